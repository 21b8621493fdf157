"""The custom resources of KubeRay 1.6 and of the Prometheus operator, as far as `cluster/kuberay/` uses them.

Written after KubeRay's CRD API reference of v1.6.2: its names, types, limits and rules. A field that is not here is an
error. Pod templates are `Any` here: kubernetes-validate has their schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Cron = Annotated[str, Field(pattern=r"^\S+( \S+){4}$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name
    labels: dict[str, str] = {}


class AuthOptions(Strict):
    mode: Literal["token", "disabled"] = "token"
    secretName: Name | None = None


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"] | None = None
    idleTimeoutSeconds: Count | None = None
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(Strict):
    groupName: Name
    replicas: Count
    minReplicas: Count
    maxReplicas: AtLeastOne
    rayStartParams: dict[str, str]
    template: dict[str, Any]

    @model_validator(mode="after")
    def _in_order(self) -> WorkerGroup:
        assert self.minReplicas <= self.replicas <= self.maxReplicas, "replicas lie between least and most"
        return self


class ClusterSpec(Strict):
    rayVersion: str
    authOptions: AuthOptions | None = None
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    headGroupSpec: HeadGroup
    workerGroupSpecs: Annotated[list[WorkerGroup], Field(min_length=1)]

    @model_validator(mode="after")
    def _scales(self) -> ClusterSpec:
        fixed = all(group.minReplicas == group.maxReplicas for group in self.workerGroupSpecs)
        assert self.enableInTreeAutoscaling != fixed, "the autoscaler is there where there is room to scale"
        assert self.enableInTreeAutoscaling or self.autoscalerOptions is None, "options of an autoscaler that is off"
        return self

    def templates(self) -> list[dict[str, Any]]:
        return [self.headGroupSpec.template, *(group.template for group in self.workerGroupSpecs)]


class ServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: ClusterSpec
    excludeHeadPodFromServeSvc: bool = False
    rayClusterDeletionDelaySeconds: Count = 60


class JobSpec(Strict):
    entrypoint: str
    entrypointNumCpus: Annotated[float, Field(gt=0)] | int | None = None
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode"] = "K8sJobMode"
    backoffLimit: Count = 0
    activeDeadlineSeconds: AtLeastOne | None = None
    shutdownAfterJobFinishes: bool = False
    ttlSecondsAfterFinished: Count = 0
    rayClusterSpec: ClusterSpec

    @model_validator(mode="after")
    def _rules(self) -> JobSpec:
        assert not self.ttlSecondsAfterFinished or self.shutdownAfterJobFinishes, "a TTL needs shutdownAfterJobFinishes"
        return self


class CronSpec(Strict):
    schedule: Cron
    suspend: bool = False
    jobTemplate: JobSpec


class RayResource(Strict):
    apiVersion: Literal["ray.io/v1"]
    metadata: Metadata


class RayCluster(RayResource):
    kind: Literal["RayCluster"]
    spec: ClusterSpec

    def cluster(self) -> ClusterSpec:
        return self.spec


class RayService(RayResource):
    kind: Literal["RayService"]
    spec: ServiceSpec

    def cluster(self) -> ClusterSpec:
        return self.spec.rayClusterConfig


class RayJob(RayResource):
    kind: Literal["RayJob"]
    spec: JobSpec

    def cluster(self) -> ClusterSpec:
        return self.spec.rayClusterSpec


class RayCronJob(RayResource):
    kind: Literal["RayCronJob"]
    spec: CronSpec

    def cluster(self) -> ClusterSpec:
        return self.spec.jobTemplate.rayClusterSpec


class Relabeling(Strict):
    targetLabel: str
    replacement: str


class MetricsEndpoint(Strict):
    port: str
    path: str
    interval: Annotated[str, Field(pattern=r"^[0-9]+s$")]
    relabelings: list[Relabeling] = []


class Selector(Strict):
    matchLabels: dict[str, str]


class PodMonitorSpec(Strict):
    selector: Selector
    podMetricsEndpoints: list[MetricsEndpoint]


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


RAY_KINDS = {"RayCluster": RayCluster, "RayService": RayService, "RayJob": RayJob, "RayCronJob": RayCronJob}
