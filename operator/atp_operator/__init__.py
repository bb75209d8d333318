# SPDX-License-Identifier: Apache-2.0
"""The operator of ATP on Kubernetes.

Pure planning knows neither clock, socket nor cluster: it maps objects and a time to objects. `model` reads them,
`planning` plans all of them with what they share (`allocation`, `quota`, `topology`, `claims`), `lifecycle` steps one
job, `desired` says what switches and sidecars are told, `pods` and `injection` what is made, `intake`, `validation`,
`sizes` and `admission` what is let in. The edges feed it and carry out what it says: `handlers` (kopf), `watching` and
`caches` on the way in, `controller` in the middle, `apply`, `creation`, `events`, `sessions` and `softswitches` on the
way out, `webhook` and `leader` beside them. Nothing is remembered outside the cluster's objects.
"""

GROUP = "atp.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FINALIZER = f"{GROUP}/release"
LABEL_JOB = f"{GROUP}/job"
LABEL_ROLE = f"{GROUP}/role"
LABEL_RANK = f"{GROUP}/rank"
LABEL_EPOCH = f"{GROUP}/epoch"
LABEL_MANAGED_BY = f"{GROUP}/managed-by"
ANNOTATION_ASSIGNMENT = f"{GROUP}/assignment"
ANNOTATION_REFRESH = f"{GROUP}/refresh"
ANNOTATION_INJECTED = f"{GROUP}/sidecar-injected"
ROLE_WORKER = "worker"
ROLE_PARAMETER_SERVER = "parameter-server"
SIDECAR_NAME = "atp-sidecar"
__version__ = "0.1.0"
