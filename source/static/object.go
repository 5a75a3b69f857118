package static

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// head is what tells an object's kind and name.
type head struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
}

// String returns what the object is called in problems, as far as it is known:
// "Service default/dns", "Node n1", "Pod".
func (h *head) String() string {
	name := h.Metadata.Name
	if name != "" && h.Kind != "Node" {
		name = h.namespace() + "/" + name
	}
	return strings.TrimSpace(h.Kind + " " + name)
}

func (h *head) namespace() string {
	if h.Metadata.Namespace == "" {
		return metav1.NamespaceDefault
	}
	return h.Metadata.Namespace
}

// read sets what a top-level field of a JSON object says of the head. A value of
// a wrong type is met again, and reported, where the object is decoded.
func (h *head) read(field json.Token, value json.RawMessage) {
	switch field {
	case "apiVersion":
		_ = json.Unmarshal(value, &h.APIVersion)
	case "kind":
		_ = json.Unmarshal(value, &h.Kind)
	case "metadata":
		_ = json.Unmarshal(value, &h.Metadata)
	}
}

// own tells whether the object is of this project's API group.
func (h *head) own() bool { return strings.HasPrefix(h.APIVersion, apiGroup+"/") }

// list tells whether the object is a list of Kubernetes objects, and what its
// items are where they do not say it themselves.
func (h *head) list() (of head, ok bool) {
	switch h.Kind {
	case "List":
		return head{}, true
	case "ServiceList", "EndpointSliceList", "NodeList", "PodList":
		return head{APIVersion: h.APIVersion, Kind: strings.TrimSuffix(h.Kind, "List")}, true
	}
	return head{}, false
}

// object reads a Kubernetes object. Its JSON is asked for only where it matters.
func (r *reader) object(h head, line int, data func() ([]byte, error)) {
	ignored := r.state.Ignored
	defer func() { r.seen = r.seen || r.state.Ignored == ignored }()
	switch h.APIVersion + " " + h.Kind {
	case "v1 Service":
		decode(r, &r.kubernetes.Services, h, line, data)
	case "discovery.k8s.io/v1 EndpointSlice":
		decode(r, &r.kubernetes.EndpointSlices, h, line, data)
	case "v1 Node":
		decode(r, &r.kubernetes.Nodes, h, line, data)
	case "v1 Pod":
		decode(r, &r.kubernetes.Pods, h, line, data)
	default:
		_, isList := h.list()
		switch {
		case h.Kind == "" || h.APIVersion == "":
			r.report(line, h.String(), "", errors.New("not an object with apiVersion and kind"))
		case isList:
			r.report(line, "", "", fmt.Errorf("a %s inside a list is not read; give its items", h.Kind))
		case h.Kind == "EndpointSlice" && strings.HasPrefix(h.APIVersion, "discovery.k8s.io/"):
			r.report(line, h.String(), "apiVersion", fmt.Errorf("%s is not read; give discovery.k8s.io/v1", h.APIVersion))
		case h.Kind == "Endpoints" && h.APIVersion == "v1":
			r.report(line, h.String(), "", errors.New("is not read; give its EndpointSlices"))
		default:
			r.state.Ignored++
		}
	}
}

// decode adds an object to its list, or puts it in the place of an earlier one
// of the same name.
func decode[T any, P interface {
	*T
	metav1.Object
}](r *reader, list *[]P, h head, line int, data func() ([]byte, error)) {
	obj := P(new(T))
	text, err := data()
	if err == nil {
		err = json.Unmarshal(text, obj)
	}
	if err != nil {
		var wrong *json.UnmarshalTypeError
		var path string
		if errors.As(err, &wrong) {
			line += bytes.Count(text[:wrong.Offset], []byte("\n"))
			path, err = wrong.Field, fmt.Errorf("%s where %s belongs", wrong.Value, wrong.Type)
		}
		r.report(line, h.String(), path, err)
		return
	}
	if obj.GetName() == "" {
		r.report(line, h.String(), "metadata.name", errors.New("is missing"))
		return
	}
	if h.Metadata.Name = obj.GetName(); h.Kind != "Node" {
		h.Metadata.Namespace = obj.GetNamespace()
		obj.SetNamespace(h.namespace())
	}
	name := h.String()
	at, again := r.objects[name]
	if again {
		(*list)[at.index] = obj
	} else {
		at.index = len(*list)
		*list = append(*list, obj)
	}
	r.objects[name] = place{r.input, line, at.index}
}
