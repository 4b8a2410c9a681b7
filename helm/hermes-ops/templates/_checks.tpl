{{/* What a schema cannot say in one clear line: names that the controller, or the plan of each sweep, would refuse. */}}
{{- define "hermes.checkPolicy" -}}
{{- $live := list "2d-gittins" "2d-las" "afs" "asha" "doubling" "elastic-2d-las" "elastic-fifo" "elastic-frontrunner" "fair" "fifo" "fifo-backfill" "frontrunner" "hermes" "hyperband" "hypersched" "median" "ones" "optimus" "pollux" "pop" "qssf" "saxena" "slaq" "slaq-sized" "successive-halving" "themis" "throughput" "yarn-cs" -}}
{{- $name := .Values.policy.name -}}
{{- if not (or (has $name $live) .Values.policy.ofPackage) -}}
{{- fail (printf "policy.name: %s is no policy of a pool; allowed: %s. Name one of these, or set policy.ofPackage if a package in the image brings it" $name (join ", " $live)) -}}
{{- end -}}
{{- end -}}

{{- define "hermes.checkTrialsPod" -}}
{{- $owned := list "CUDA_VISIBLE_DEVICES" "NVIDIA_VISIBLE_DEVICES" "HIP_VISIBLE_DEVICES" "ROCR_VISIBLE_DEVICES" "GPU_DEVICE_ORDINAL" "MLFLOW_RUN_ID" "MLFLOW_EXPERIMENT_ID" "MLFLOW_EXPERIMENT_NAME" -}}
{{- $pod := .Values.trials.pod -}}
{{- range $name, $_ := $pod.environment -}}
{{- if has $name $owned -}}
{{- fail (printf "trials.pod.environment.%s: each trial gets its own; remove it" $name) -}}
{{- else if hasPrefix "HERMES_" (upper $name) -}}
{{- fail (printf "trials.pod.environment.%s: names that begin with HERMES_ are of Hermes Ops; rename the variable" $name) -}}
{{- else if not (regexMatch "^[A-Za-z_][A-Za-z0-9_]*$" $name) -}}
{{- fail (printf "trials.pod.environment: %q is no name of a variable; allowed: letters, digits and _, no digit first. Rename it" $name) -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $name, $_ := default dict (get $pod $kind) -}}
{{- if regexMatch "(?i)^gpu\\.intel\\.com/|/(v|p)?gpu|/(mig-|tpu|gaudi|neuron|ascend|mlu)" $name -}}
{{- fail (printf "trials.pod.%s: %s is a GPU, and the pool grants those; remove it. trials.pod.gpu_resource says of what they are" $kind $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $number, $volume := $pod.volumes -}}
{{- $sources := list -}}
{{- range list "claim" "config_map" "secret" "memory" -}}
{{- if not (kindIs "invalid" (index $volume .)) -}}
{{- $sources = append $sources . -}}
{{- end -}}
{{- end -}}
{{- if ne (len $sources) 1 -}}
{{- fail (printf "trials.pod.volumes[%d]: found %s; allowed: exactly one of claim, config_map, secret, memory. Name one source" $number (default "no source" (join " and " $sources))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
