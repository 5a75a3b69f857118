# Every target works without root and without a network once the modules are downloaded.

GO       ?= go
BIN      := $(CURDIR)/bin
VERSION  ?= $(shell git describe --tags --always --dirty --abbrev=12 2>/dev/null || echo devel)
LDFLAGS  := -X github.com/flowsweep/flowsweep/internal/cli.version=$(VERSION)

TESTFLAGS ?=
FUZZTIME  ?= 30s
BENCHTIME ?= 1x
# What is not Linux/amd64 and must build: saved tables are judged anywhere, and 32 bits find what
# 64 bits hide.
PLATFORMS ?= darwin/arm64 windows/amd64 linux/arm64 linux/386

# Of the packages; the program runs on every Linux that Go knows.
ARCHES ?= amd64 arm64

LINT := $(BIN)/golangci-lint
NFPM := $(BIN)/nfpm
E2E  := $(BIN)/e2e
HELM := $(E2E)/helm
IMAGE ?= flowsweep:$(VERSION)
export GOLANGCI_LINT_CACHE := $(BIN)/lint-cache

.PHONY: help build test race cover lint fmt fuzz bench cross package differential e2e-tools e2e engines kernels chart render image clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## bin/flowsweep, static
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/flowsweep ./cmd/flowsweep

test: ## every unit, property, fuzz-seed and kernel test
	$(GO) test $(TESTFLAGS) ./...

race: ## the same under the race detector
	$(GO) test -race $(TESTFLAGS) ./...

cover: ## the same with the share of statements that were run, by function in bin/cover.txt
	@mkdir -p $(BIN)
	$(GO) test -coverpkg=./... -coverprofile=$(BIN)/cover.out $(TESTFLAGS) ./...
	@$(GO) tool cover -func=$(BIN)/cover.out >$(BIN)/cover.txt && tail -n 1 $(BIN)/cover.txt

lint: $(LINT) ## the linters, for Linux and for macOS
	$(LINT) config verify
	GOOS=linux $(LINT) run ./...
	@# What only Linux uses is no fault elsewhere.
	GOOS=darwin GOARCH=arm64 $(LINT) run --disable unused,unparam ./...

fmt: $(LINT) ## format the code as the linters want it
	$(LINT) fmt ./...

fuzz: ## each fuzz target for FUZZTIME (30s, or 20000x: so many runs)
	@# By name, since to ask each package for its targets is to link all their tests.
	@files=$$($(GO) list -f '{{range .TestGoFiles}}{{$$.Dir}}/{{.}} {{end}}{{range .XTestGoFiles}}{{$$.Dir}}/{{.}} {{end}}' ./...) && \
	list=$$(grep -o '^func Fuzz[A-Za-z0-9_]*' $$files) && \
	echo "$$list" | sed 's,/[^/]*:func , ,' | \
	while read -r pkg target; do \
		echo "$$target in $${pkg#$(CURDIR)/}"; \
		$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$pkg </dev/null || exit 1; \
	done

differential: ## what the ruleset package predicts and judges against the kernel, for twice DIFFERENTIAL (10m)
	FLOWSWEEP_DIFFERENTIAL_FOR=$(or $(DIFFERENTIAL),10m) \
		$(GO) test -count=1 -timeout 1h -v -run TestDifferential ./ruleset

bench: build ## each micro-benchmark once (BENCHTIME=1s to measure), and bench/ on a small table
	$(GO) test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) ./...
	$(GO) -C bench test -count=1 ./...
	$(GO) -C bench run . -flowsweep $(BIN)/flowsweep -parts table,latency -sizes 10000 -runs 1

cross: ## build and vet for PLATFORMS
	@for p in $(PLATFORMS); do \
		echo "$$p"; \
		export CGO_ENABLED=0 GOOS=$${p%/*} GOARCH=$${p#*/}; \
		$(GO) build -o /dev/null ./cmd/flowsweep && $(GO) vet ./... || exit 1; \
	done

package: $(NFPM) ## bin/packages/*.deb and *.rpm for ARCHES (amd64 arm64)
	rm -rf $(BIN)/packages
	GO='$(GO)' NFPM=$(NFPM) VERSION=$(VERSION) deploy/package/build $(BIN)/packages $(ARCHES)

e2e-tools: ## bin/e2e: etcd, kube-apiserver, kube-proxy, kubectl and helm (minutes, once)
	GO='$(GO)' test/e2e/build $(E2E)

e2e: e2e-tools build ## the agent beside a real control plane and kube-proxy (root)
	$(GO) test -tags e2e -count=1 -timeout 30m -parallel 5 -v $(TESTFLAGS) ./test/e2e

engines: build ## the judgement by rules beside Docker, Podman and a router (root)
	$(GO) test -tags engines -count=1 -timeout 20m -v $(TESTFLAGS) ./test/engines

kernels: ## the kernel tests on Debian's kernels, under emulation (minutes)
	$(GO) test -tags kernels -count=1 -timeout 30m -v $(TESTFLAGS) ./test/kernels

chart: e2e-tools build ## check the Helm chart and what is rendered from it
	HELM=$(HELM) KUBECTL=$(E2E)/kubectl .ci/chart

render: e2e-tools ## make from the chart: install.yaml, the kustomize base, the table of values
	HELM=$(HELM) deploy/render

image: ## a container image IMAGE for this machine's architecture
	GO='$(GO)' VERSION=$(VERSION) deploy/image/build $(IMAGE) $(shell $(GO) env GOARCH)

clean: ## remove bin/
	rm -rf $(BIN)

# Built again only when a tool's version changes.
$(LINT): tools/go.mod tools/go.sum
	$(GO) -C tools build -o $(LINT) github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $(LINT)

$(NFPM): tools/nfpm/go.mod tools/nfpm/go.sum
	$(GO) -C tools/nfpm build -o $(NFPM) github.com/goreleaser/nfpm/v2/cmd/nfpm
	@touch $(NFPM)
