{{- define "tierlog.selector" -}}
app.kubernetes.io/name: tierlog
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tierlog.scheme" -}}
{{ .Values.tls.secret | empty | ternary "http" "https" }}
{{- end }}

{{- define "tierlog.pod" -}}
$(POD_NAME).{{ include "tierlog.name" . }}-pods.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "tierlog.labels" -}}
{{ include "tierlog.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tierlog.name" -}}
{{ contains "tierlog" .Release.Name | ternary .Release.Name (printf "%s-tierlog" .Release.Name) | trunc 52 | trimSuffix "-" }}
{{- end }}
