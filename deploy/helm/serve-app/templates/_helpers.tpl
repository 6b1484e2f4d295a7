{{- define "labels" -}}
app.kubernetes.io/part-of: serve-app
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "from-secret" -}}
valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}

{{/* What a pod of the head and one of a worker have alike. */}}
{{- define "pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 0 }}
{{- end }}
volumes:
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {sizeLimit: {{ .Values.homeSize }}}}
- {name: cluster-file, configMap: {name: {{ .Release.Name }}}}
{{- range .Values.volumes }}
- name: {{ .name }}
  persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: {{ .readOnly | default false }}}
{{- end }}
{{- end }}

{{- define "container" -}}
image: {{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
# KubeRay appends `ray start` to this; `$$(` is Kubernetes' way to write `$(`.
command: ['eval "$$(serve_app env)"']
securityContext: {{- include "restricted" . | nindent 2 }}
env:
- name: SERVE_APP_PEPPER
  {{- include "from-secret" (dict "secret" .Values.secret "key" "pepper") | nindent 2 }}
- name: PGPASSWORD
  {{- include "from-secret" (dict "secret" .Values.secret "key" "PGPASSWORD") | nindent 2 }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
volumeMounts:
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/serve_app}
- {name: cluster-file, mountPath: /etc/serve_app, readOnly: true}
{{- range .Values.volumes }}
- {name: {{ .name }}, mountPath: {{ .path }}, readOnly: {{ .readOnly | default false }}}
{{- end }}
{{- end }}
