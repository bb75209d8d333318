# SPDX-License-Identifier: Apache-2.0
"""The operator of ATP on Kubernetes.

Pure planning (`allocation`, `topology`, `quota`, `claims`, `lifecycle`, `planning`, `desired`, `pods`, `injection`,
`validation`, `sizes`, `intake`, `admission`, `fair`) knows neither clock, socket nor cluster: it maps objects and a
time to objects. The edges (`handlers` for kopf, `kube`, `watching`, `agent`, `leader`, `controller`, `webhook`) feed
it and carry out what it says. Nothing is remembered outside the cluster's objects.
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
