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
