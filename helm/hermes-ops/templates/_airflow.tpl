{{/* Airflow's configuration, as `hermes up` has it; what is secret is read from mounted files. */}}
{{- define "hermes.airflowConfig" -}}
{{- $share := "/opt/hermes/lib/python3.11/site-packages/hermes_ops/share" -}}
{{- $url := include "hermes.airflowUrl" . -}}
{{- $bundle := dict "name" "hermes" "classpath" "airflow.dag_processing.bundles.local.LocalDagBundle" "kwargs" (dict "path" (printf "%s/dags" $share) "refresh_interval" 5) -}}
{{- $users := printf "admin:admin,hermes-controller:user%s" (.Values.poolSync.enabled | ternary ",hermes-pool:op" "") -}}
{{- $sections := dict
  "core" (dict
    "executor" "LocalExecutor"
    "dags_folder" (printf "%s/dags" $share)
    "plugins_folder" (printf "%s/plugins" $share)
    "fernet_key_cmd" "cat /run/secrets/airflow/fernet-key"
    "load_examples" "False"
    "parallelism" (add (mul 2 (int .Values.pool.slots)) 8 | toString)
    "max_active_tasks_per_dag" "10000"
    "max_active_runs_per_dag" "1000"
    "max_map_length" "100000"
    "dagbag_import_timeout" "240"
    "mp_start_method" "fork"
    "execution_api_server_url" (printf "%s/execution/" $url)
    "hostname_callable" "socket.gethostname"
    "min_serialized_dag_update_interval" "5"
    "simple_auth_manager_users" $users
    "simple_auth_manager_passwords_file" "/tmp/airflow-users.json")
  "api" (dict
    "host" "0.0.0.0"
    "port" "8080"
    "base_url" .Values.airflow.baseUrl
    "workers" "1"
    "secret_key_cmd" "cat /run/secrets/airflow/api-secret"
    "maximum_page_limit" "1000")
  "api_auth" (dict "jwt_secret_cmd" "cat /run/secrets/airflow/jwt-secret")
  "scheduler" (dict
    "scheduler_idle_sleep_time" "0.1"
    "scheduler_heartbeat_sec" "2"
    "job_heartbeat_sec" "2"
    "scheduler_health_check_threshold" "15"
    "orphaned_tasks_check_interval" "5"
    "task_instance_heartbeat_timeout" "20"
    "task_instance_heartbeat_timeout_detection_interval" "3"
    "max_dagruns_per_loop_to_schedule" "50"
    "enable_health_check" "True")
  "workers" (dict
    "min_heartbeat_interval" "1"
    "max_failed_heartbeats" "60"
    "missing_dag_retry_delay" "2")
  "triggerer" (dict "job_heartbeat_sec" "2" "triggerer_health_check_threshold" "10")
  "logging" (dict
    "base_log_folder" "/var/log/airflow"
    "dag_processor_child_process_log_directory" "/tmp/dag_processor"
    "colored_console_log" "False"
    "uvicorn_logging_level" "WARNING"
    "namespace_levels" "http.access=WARNING")
  "database" (dict
    "sql_alchemy_conn_cmd" "cat /run/secrets/database/connection"
    "load_default_connections" "False")
  "dag_processor" (dict
    "dag_bundle_config_list" (list $bundle | toJson)
    "refresh_interval" "5"
    "bundle_refresh_check_interval" "2"
    "min_file_process_interval" "30"
    "parsing_processes" "1"
    "dag_file_processor_timeout" "300")
-}}
{{- range $section, $options := .Values.airflow.config -}}
{{- $whole := default (dict) (get $sections $section) -}}
{{- range $name, $value := $options -}}
{{- $_ := set $whole $name $value -}}
{{- end -}}
{{- $_ := set $sections $section $whole -}}
{{- end -}}
{{- range $section, $options := $sections }}
[{{ $section }}]
{{- range $name, $value := $options }}
{{ $name }} = {{ $value | toString | replace "%" "%%" | replace "\n" "\n  " }}
{{- end }}
{{ end }}
{{- end -}}

{{/* Environment of everything that runs Hermes Ops' own code. */}}
{{- define "hermes.environment" -}}
- {name: HERMES_HOME, value: /hermes}
- {name: HERMES_RUN_IN, value: pod}
- {name: HERMES_POD_DEFAULTS, value: /etc/hermes/pod.yaml}
- {name: HERMES_POD_RULES, value: /etc/hermes/rules.yaml}
- {name: HERMES_POOL, value: {{ .Values.pool.name | quote }}}
{{- with .Values.pool.nodes }}
- {name: HERMES_NODES, value: {{ . | quote }}}
{{- end }}
- {name: HERMES_AIRFLOW_URL, value: {{ include "hermes.airflowUrl" . | quote }}}
- {name: MLFLOW_TRACKING_URI, value: {{ include "hermes.mlflowUrl" . | quote }}}
- {name: AIRFLOW_HOME, value: /tmp/airflow}
- {name: HOME, value: /tmp}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: MLFLOW_DISABLE_TELEMETRY, value: "true"}
- {name: DO_NOT_TRACK, value: "true"}
{{- end -}}

{{/* The log-in at MLflow, of the containers alone that ask it anything. */}}
{{- define "hermes.mlflowLogin" -}}
{{- if include "hermes.mlflowAuth" . }}
- {name: MLFLOW_TRACKING_USERNAME, value: {{ default "hermes" .Values.mlflow.auth.user | quote }}}
- name: MLFLOW_TRACKING_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "hermes.mlflowUsersSecret" . | quote }}, key: hermes-password}}
{{- end }}
{{- end -}}

{{- define "hermes.airflowEnvironment" -}}
{{ include "hermes.environment" . }}
- {name: AIRFLOW_CONFIG, value: /etc/airflow/airflow.cfg}
{{- end -}}

{{/* Mounts that every Airflow component has. */}}
{{- define "hermes.airflowMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/airflow, readOnly: true}
- {name: keys, mountPath: /run/secrets/airflow, readOnly: true}
- {name: database, mountPath: /run/secrets/database, readOnly: true}
{{- end -}}

{{- define "hermes.airflowVolumes" -}}
- {name: tmp, emptyDir: {}}
- name: config
  configMap: {name: {{ include "hermes.fullname" . }}-airflow}
- name: keys
  secret: {secretName: {{ include "hermes.fullname" . }}-airflow, defaultMode: 0440}
- name: database
  secret:
    secretName: {{ include "hermes.airflowDatabaseSecret" . | quote }}
    defaultMode: 0440
    items: [{key: connection, path: connection}]
- name: home
  persistentVolumeClaim: {claimName: {{ include "hermes.claim" . | quote }}}
{{- end -}}

{{/* HERMES_HOME, and the installation's defaults and rules of trials' pods. */}}
{{- define "hermes.homeMounts" -}}
- {name: home, mountPath: /hermes}
- {name: pod-defaults, mountPath: /etc/hermes, readOnly: true}
{{- end -}}

{{- define "hermes.podDefaultsVolume" -}}
- name: pod-defaults
  configMap: {name: {{ include "hermes.fullname" . }}-trials}
{{- end -}}

{{/* The step before each Airflow component: its database has this version's tables. */}}
{{- define "hermes.airflowWait" -}}
- name: await-migration
  {{- include "hermes.image" (list . "airflow") | nindent 2 }}
  command: [airflow, db, check-migrations, --migration-wait-timeout, "600"]
  {{- include "hermes.container" . | nindent 2 }}
  env:
    {{- include "hermes.airflowEnvironment" . | nindent 4 }}
  volumeMounts:
    {{- include "hermes.airflowMounts" . | nindent 4 }}
    - {name: tmp, mountPath: /var/log/airflow, subPath: logs}
  resources: {{- toYaml .Values.airflow.migration.resources | nindent 4 }}
{{- end -}}

{{/* Restarted when what it reads at its start has changed. */}}
{{- define "hermes.airflowAnnotations" -}}
checksum/config: {{ include "hermes.airflowConfig" . | sha256sum }}
{{- end -}}

{{/* A probe of a component that serves nothing: its heartbeat, as the API server shows it. */}}
{{- define "hermes.heartbeat" -}}
exec: {command: [python, -P, -m, hermes_ops.airflow.heartbeat, {{ . }}]}
{{- end -}}
