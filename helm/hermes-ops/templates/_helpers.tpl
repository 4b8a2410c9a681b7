{{/* The name that those of all objects begin with: Services must begin with a letter. */}}
{{- define "hermes.fullname" -}}
{{- $name := include "hermes.wholeName" . | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the release's name %s: names of Services have small letters, digits and - only, and begin with a letter; choose another one, or set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "hermes.wholeName" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if or (contains $name .Release.Name) (contains "hermes" .Release.Name) -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name -}}
{{- end -}}
{{- end -}}

{{/* Selector labels of a component: (list . "controller") */}}
{{- define "hermes.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "hermes.labels" -}}
{{- $root := index . 0 -}}
{{ include "hermes.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* metadata of an object of a component: (list . "controller" "-suffix") */}}
{{- define "hermes.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "hermes.fullname" $root }}{{ index . 2 }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- include "hermes.labels" (list $root (index . 1)) | nindent 2 }}
{{- end -}}

{{- define "hermes.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
image: {{ include "hermes.imageName" . | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* An image by its digest, which nobody can change, or else by its tag: (list . "airflow") */}}
{{- define "hermes.imageName" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Whether trials have a namespace of their own, as a word. */}}
{{- define "hermes.ownTrialsNamespace" -}}
{{- if .Values.trials.namespace.enabled -}}true{{- end -}}
{{- end -}}

{{- define "hermes.trialsNamespace" -}}
{{- if not .Values.trials.namespace.enabled -}}
{{- .Release.Namespace -}}
{{- else -}}
{{- $name := default (printf "%s-trials" .Release.Namespace) .Values.trials.namespace.name -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "trials.namespace.name: %s has more than 63 characters; name a shorter one" $name) -}}
{{- end -}}
{{- if eq $name .Release.Namespace -}}
{{- fail (printf "trials.namespace.name: %s is the release's own namespace; name another one, or set trials.namespace.enabled to false" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* metadata of an object in the trials' namespace: (list . "-suffix") */}}
{{- define "hermes.trialsMetadata" -}}
{{- $root := index . 0 -}}
name: {{ include "hermes.fullname" $root }}{{ index . 1 }}
namespace: {{ include "hermes.trialsNamespace" $root | quote }}
labels:
  {{- include "hermes.labels" (list $root "trials") | nindent 2 }}
{{- end -}}

{{/* The Service by which the pods of a trial on several nodes find each other. */}}
{{- define "hermes.gangService" -}}
{{- default (printf "%s-gangs" (include "hermes.fullname" .)) .Values.trials.pod.gang_service -}}
{{- end -}}

{{/* The claim of the trials' folders in the trials' namespace. */}}
{{- define "hermes.trialsClaim" -}}
{{- if .Values.trials.pod.claim -}}
{{- .Values.trials.pod.claim -}}
{{- else if include "hermes.ownTrialsNamespace" . -}}
{{- include "hermes.fullname" . }}-trials
{{- else -}}
{{- include "hermes.claim" . -}}
{{- end -}}
{{- end -}}

{{/* What every pod has; (list . "component" user-id), and true where it talks to the API server */}}
{{- define "hermes.pod" -}}
{{- $root := index . 0 -}}
automountServiceAccountToken: {{ and (gt (len .) 3) (last .) }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ index . 2 }}
  runAsGroup: {{ index . 2 }}
  fsGroup: {{ index . 2 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "hermes.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "hermes.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "hermes.airflowUrl" -}}
{{- if .Values.airflow.enabled -}}
http://{{ include "hermes.fullname" . }}-airflow:8080
{{- else -}}
{{- required "existingAirflow.url: the address of the Airflow that is already there" .Values.existingAirflow.url -}}
{{- end -}}
{{- end -}}

{{- define "hermes.mlflowUrl" -}}
{{- if .Values.mlflow.enabled -}}
http://{{ include "hermes.fullname" . }}-mlflow:5000
{{- else -}}
{{- required "mlflow.url: the address of the MLflow server that is already there" .Values.mlflow.url -}}
{{- end -}}
{{- end -}}

{{/* MLflow's address for pods of another namespace. */}}
{{- define "hermes.mlflowUrlForTrials" -}}
{{- if .Values.mlflow.enabled -}}
http://{{ include "hermes.fullname" . }}-mlflow.{{ .Release.Namespace }}.svc:5000
{{- else -}}
{{- .Values.mlflow.url -}}
{{- end -}}
{{- end -}}

{{- define "hermes.claim" -}}
{{- default (printf "%s-home" (include "hermes.fullname" .)) .Values.storage.existingClaim -}}
{{- end -}}

{{/* The Secret with the addresses of Airflow's database, for its owner and for the controller. */}}
{{- define "hermes.airflowDatabaseSecret" -}}
{{- if .Values.postgresql.enabled -}}
{{- include "hermes.fullname" . }}-airflow-database
{{- else -}}
{{- required "airflow.databaseSecret: a Secret with Airflow's database, as postgresql.enabled is false" .Values.airflow.databaseSecret -}}
{{- end -}}
{{- end -}}

{{- define "hermes.controllerDatabaseSecret" -}}
{{- if not .Values.airflow.enabled -}}
{{- required "existingAirflow.databaseSecret: a Secret with the controller's address of Airflow's database" .Values.existingAirflow.databaseSecret -}}
{{- else if .Values.postgresql.enabled -}}
{{- include "hermes.fullname" . }}-controller
{{- else -}}
{{- include "hermes.airflowDatabaseSecret" . -}}
{{- end -}}
{{- end -}}

{{- define "hermes.controllerPasswordSecret" -}}
{{- if .Values.airflow.enabled -}}
{{- include "hermes.fullname" . }}-controller
{{- else -}}
{{- required "existingAirflow.passwordSecret: a Secret with the password of existingAirflow.user" .Values.existingAirflow.passwordSecret -}}
{{- end -}}
{{- end -}}

{{- define "hermes.poolPasswordSecret" -}}
{{- if .Values.airflow.enabled -}}
{{- include "hermes.fullname" . }}-pool-sync
{{- else -}}
{{- required "existingAirflow.poolPasswordSecret: a Secret with the password of existingAirflow.poolUser" .Values.existingAirflow.poolPasswordSecret -}}
{{- end -}}
{{- end -}}

{{- define "hermes.mlflowDatabaseSecret" -}}
{{- if .Values.postgresql.enabled -}}
{{- include "hermes.fullname" . }}-mlflow
{{- else -}}
{{- required "mlflow.databaseSecret: a Secret with MLflow's database, as postgresql.enabled is false" .Values.mlflow.databaseSecret -}}
{{- end -}}
{{- end -}}

{{/* Whether MLflow asks to log in, as a word. */}}
{{- define "hermes.mlflowAuth" -}}
{{- if .Values.mlflow.auth.enabled -}}true{{- end -}}
{{- end -}}

{{- define "hermes.mlflowUsersSecret" -}}
{{- default (printf "%s-mlflow-users" (include "hermes.fullname" .)) .Values.mlflow.auth.existingSecret -}}
{{- end -}}

{{- define "hermes.mlflowTrialsSecret" -}}
{{- default (printf "%s-mlflow-trials" (include "hermes.fullname" .)) .Values.mlflow.auth.trialsSecret -}}
{{- end -}}

{{/* True, as a word, where something of this chart needs the chart's own PostgreSQL. */}}
{{- define "hermes.ownDatabase" -}}
{{- if and .Values.postgresql.enabled (or .Values.airflow.enabled .Values.mlflow.enabled) -}}true{{- end -}}
{{- end -}}

{{/* The bytes of a quantity of storage, as 10Gi. */}}
{{- define "hermes.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]*$" .) | float64) | printf "%.0f" -}}
{{- end -}}

{{/* Fails where the database's volume has another size or class: a StatefulSet keeps those it was made with. */}}
{{- define "hermes.checkDatabaseVolume" -}}
{{- $name := printf "%s-postgresql" (include "hermes.fullname" .) -}}
{{- $set := default (dict) (lookup "apps/v1" "StatefulSet" .Release.Namespace $name) -}}
{{- range (default (dict) $set.spec).volumeClaimTemplates -}}
{{- $size := .spec.resources.requests.storage -}}
{{- if ne (include "hermes.bytes" $size) (include "hermes.bytes" $.Values.postgresql.size) -}}
{{- fail (printf "postgresql.size: %s, and the StatefulSet %s was made with %s, which Kubernetes does not change: set %s again, or enlarge the volume first (docs/kubernetes.md#a-larger-database)" $.Values.postgresql.size $name $size $size) -}}
{{- end -}}
{{- $class := default "" .spec.storageClassName -}}
{{- if ne $class $.Values.postgresql.storageClass -}}
{{- fail (printf "postgresql.storageClass: %q, and the StatefulSet %s was made with %q, which Kubernetes does not change: set that again, or move the database by a backup (docs/backup.md)" $.Values.postgresql.storageClass $name $class) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of the DNS server's pods: Helm would add those that are named to a default of labels. */}}
{{- define "hermes.dnsLabels" -}}
{{- $labels := dict -}}
{{- range $name, $text := .Values.networkPolicy.dns.podLabels -}}
{{- if not (kindIs "invalid" $text) -}}
{{- $_ := set $labels $name $text -}}
{{- end -}}
{{- end -}}
{{- default (dict "k8s-app" "kube-dns") $labels | toJson -}}
{{- end -}}
