{{- define "trireme.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- /* Short enough for every suffix that Services get. */}}
{{- define "trireme.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "trireme.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "trireme.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "trireme.operator" -}}
{{ include "trireme.fullname" . }}-operator
{{- end }}

{{- define "trireme.selectorLabels" -}}
app.kubernetes.io/name: {{ include "trireme.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "trireme.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "trireme.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "trireme.image" -}}
{{- $registry := default .Values.image.registry .Values.global.imageRegistry }}
{{- $name := ternary (printf "%s/%s" $registry .Values.image.repository) .Values.image.repository (ne $registry "") }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" $name .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "trireme.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "trireme.operator" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "trireme.statusTls" -}}
{{- if and .Values.status.enabled .Values.status.tls }}true{{ end }}
{{- end }}

{{- define "trireme.certManager" -}}
{{- $served := or .Values.webhook.enabled (include "trireme.statusTls" .) }}
{{- if and $served (eq .Values.webhook.certificates.mode "certManager") }}true{{ end }}
{{- end }}

{{- define "trireme.ownCertificates" -}}
{{- $served := or .Values.webhook.enabled (include "trireme.statusTls" .) }}
{{- if and $served (eq .Values.webhook.certificates.mode "internal") }}true{{ end }}
{{- end }}

{{- /* What values.schema.json cannot say. */}}
{{- define "trireme.check" -}}
{{- $election := .Values.config.leaderElection }}
{{- if and (gt (int .Values.replicaCount) 1) (not $election.enabled) }}
{{- fail "replicaCount above 1 needs config.leaderElection.enabled: two operators would act on the same jobs" }}
{{- end }}
{{- $renew := int $election.renewDeadline }}
{{- if not (and (gt (int $election.leaseDuration) $renew) (gt $renew (int $election.retryPeriod))) }}
{{- fail "config.leaderElection: leaseDuration must be above renewDeadline, and renewDeadline above retryPeriod" }}
{{- end }}
{{- if and (include "trireme.statusTls" .) (hasPrefix "http://" .Values.status.url) }}
{{- fail "status.url begins with http:// but reports are taken over TLS: https://, or status.tls: false" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled" }}
{{- end }}
{{- end }}

{{- define "trireme.args" -}}
{{- $name := include "trireme.fullname" . }}
{{- with .Values.config }}
{{- if .watchNamespace }}
- "--namespace={{ .watchNamespace }}"
{{- end }}
{{- if .leaderElection.enabled }}
- "--leader-elect"
- "--lease-name={{ $name }}-operator"
- "--lease-duration={{ .leaderElection.leaseDuration }}"
- "--renew-deadline={{ .leaderElection.renewDeadline }}"
- "--retry-period={{ .leaderElection.retryPeriod }}"
{{- else }}
- "--no-leader-elect"
{{- end }}
- "--address={{ .address }}"
- "--workers={{ .workers }}"
- "--write-threads={{ .writeThreads }}"
- "--qps={{ .apiQps }}"
- "--burst={{ int .apiBurst }}"
- {{ ternary "--watch-nodes" "--no-watch-nodes" .watchNodes | quote }}
- {{ ternary "--network-policies" "--no-network-policies" $.Values.jobs.networkPolicy.enabled | quote }}
{{- if $.Values.jobs.networkPolicy.enabled }}
- {{ printf "--scraped-by=%s" ($.Values.metrics.scrapedBy | toJson) | quote }}
{{- end }}
- {{ ternary "--do-not-disrupt" "--no-do-not-disrupt" $.Values.jobs.doNotDisrupt | quote }}
- "--scheduling-backend={{ .schedulingBackend }}"
{{- if .defaultImage }}
- "--default-image={{ .defaultImage }}"
{{- end }}
- "--sync-timeout={{ .syncTimeout }}"
- "--shutdown-timeout={{ .shutdownTimeout }}"
- "--log-format={{ .log.format }}"
- "--log-level={{ .log.level }}"
{{- end }}
- "--health-port={{ .Values.health.port }}"
- "--metrics-port={{ ternary .Values.metrics.port -1 .Values.metrics.enabled }}"
{{- if .Values.status.enabled }}
- "--status-port={{ .Values.status.port }}"
- "--status-service={{ $name }}-status"
- {{ ternary "--status-tls" "--no-status-tls" .Values.status.tls | quote }}
{{- if .Values.status.url }}
- "--status-url={{ .Values.status.url }}"
{{- end }}
{{- else }}
- "--status-port=-1"
{{- end }}
{{- if .Values.webhook.enabled }}
- "--webhook-port={{ .Values.webhook.port }}"
- "--webhook-service={{ $name }}-webhook"
{{- if include "trireme.ownCertificates" . }}
- "--webhook-validating={{ $name }}-validating"
- "--webhook-mutating={{ $name }}-mutating"
{{- end }}
{{- else }}
- "--webhook-port=-1"
{{- end }}
{{- if include "trireme.certManager" . }}
- "--webhook-cert-file=/etc/trireme/webhook/tls.crt"
- "--webhook-key-file=/etc/trireme/webhook/tls.key"
- "--webhook-ca-file=/etc/trireme/webhook/ca.crt"
{{- else if include "trireme.ownCertificates" . }}
- "--webhook-secret={{ $name }}-webhook-cert"
{{- end }}
{{- range .Values.config.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
