{{- define "atp.labels" -}}
app.kubernetes.io/name: atp
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "atp.selector" -}}
app.kubernetes.io/name: atp
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "atp.image" -}}
{{- $image := index . 1 -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}

{{/* Server name that agents' certificates carry; the operator checks it whatever address it dials. */}}
{{- define "atp.agentServerName" -}}atp-switch-agent{{- end -}}

{{- define "atp.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: { drop: [ALL] }
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "atp.scrape" -}}
{{- if (index . 0).Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ index . 1 | quote }}
{{- end }}
{{- end -}}
