{{- define "flowsweep.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* What the objects are called: after the release, and the chart where that does not tell. */}}
{{- define "flowsweep.fullname" -}}
{{- $name := include "flowsweep.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* What a DaemonSet is selected by can never be changed. */}}
{{- define "flowsweep.selectorLabels" -}}
app.kubernetes.io/name: {{ include "flowsweep.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "flowsweep.labels" -}}
{{ include "flowsweep.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "flowsweep.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "flowsweep.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "flowsweep.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "flowsweep.config" -}}
apiVersion: flowsweep.dev/v1alpha1
kind: AgentConfiguration
{{ toYaml .Values.config }}
{{- end -}}

{{/* 90 % of a memory limit in Mi or Gi, as GOMEMLIMIT has it. */}}
{{- define "flowsweep.goMemLimit" -}}
{{- $n := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Gi" . }}{{ $n = mul $n 1024 }}{{ end -}}
{{ div (mul $n 9) 10 }}MiB
{{- end -}}

{{/* A probe of the admin endpoint, which the kubelet reaches since it is on the same host. */}}
{{- define "flowsweep.probe" -}}
{{- $listen := .listen -}}
{{- $host := regexReplaceAll "^\\[?([^]]*)\\]?:[0-9]+$" $listen "${1}" -}}
httpGet:
  host: {{ has $host (list "0.0.0.0" "::") | ternary "127.0.0.1" $host | quote }}
  port: {{ regexFind "[0-9]+$" $listen }}
  path: {{ .path }}
{{- end -}}
