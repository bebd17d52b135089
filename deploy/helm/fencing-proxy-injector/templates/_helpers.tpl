{{- define "injector.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "injector.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "injector.labels" -}}
{{ include "injector.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "injector.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "injector.certificateSecret" -}}
{{- if eq .Values.certificate.source "secret" }}{{ .Values.certificate.secretName }}{{ else }}{{ include "injector.name" . }}-tls{{ end }}
{{- end }}

{{- define "injector.serverNames" -}}
- {{ include "injector.name" . }}.{{ .Release.Namespace }}.svc
- {{ include "injector.name" . }}.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}

{{/* "annotation" or "label" */}}
{{- define "injector.selection" -}}
{{- $byAnnotation := semverCompare ">=1.28-0" .Capabilities.KubeVersion.Version }}
{{- if ne .Values.selection "auto" }}{{ .Values.selection }}{{ else if $byAnnotation }}annotation{{ else }}label{{ end }}
{{- end }}

{{/*
Whether a Pod asks for a fence, in CEL: what the injector does not ignore. Its known keys ask for
nothing without inject; another key may be a misspelt inject; the label alone is a mistake.
*/}}
{{- define "injector.asks" -}}
has(object.metadata.annotations) && '{{ .Values.prefix }}/inject' in object.metadata.annotations
? object.metadata.annotations['{{ .Values.prefix }}/inject'] != 'false'
: (has(object.metadata.annotations) && object.metadata.annotations.exists(key,
key.startsWith('{{ .Values.prefix }}/') && !key.matches('/(app-port|container|steering|proxy-port|admin-port|store|store-volume|store-claim|allow-ephemeral-store|config|scope|native-sidecar|cpu-request|cpu-limit|memory-request|memory-limit|image|log-level|shutdown-grace-seconds|status|fenced)$'))) ||
(has(object.metadata.labels) && '{{ .Values.prefix }}/inject' in object.metadata.labels &&
object.metadata.labels['{{ .Values.prefix }}/inject'] == 'true')
{{- end }}
