"""The Kubernetes manifests: their schemas, and what they say about the image, the server and each other.

KubeRay's schema is in no package: OUTRIDER_KUBERAY_CRD names the file of its RayService definition (in KubeRay's
repository: ray-operator/config/crd/bases/ray.io_rayservices.yaml). Without it only the fields that we use are checked.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.dockerfile import Dockerfile
from tests.serve_command import serve_options
from tools.release import project_version

from outrider.cloud.api.app import PROBE_PATHS
from outrider.cloud.server.replicated import OpenReplica
from outrider.models.errors import ConfigError

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(path.name for path in PLACE.glob("*.yaml") if path.name != "ray-service.yaml")


def load(name: str) -> dict[str, Any]:
    """A manifest: each file holds one."""
    document: dict[str, Any]
    (document,) = yaml.safe_load_all((PLACE / name).read_text(encoding="utf-8"))
    return document


DEPLOYMENT, RAY = load("deployment.yaml"), load("ray-service.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
CLUSTER = RAY["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
RAY_PODS: dict[str, dict[str, Any]] = {"head": CLUSTER["headGroupSpec"]["template"], "worker": WORKERS["template"]}
IMAGE = Dockerfile.read(ROOT / "deploy" / "docker" / "Dockerfile.cpu")


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_kubernetes_schema(name: str) -> None:
    """Strictly: a field that Kubernetes does not know is an error, as it would be dropped."""
    import kubernetes_validate  # two seconds, for the grammars of its formats: only in the process that needs it

    kubernetes_validate.validate(load(name), "1.37", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(load(name) | {"metadate": {}}, "1.37", strict=True)


def has(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether it has these fields, among others."""
    return found == found | expected


def command() -> list[str]:
    """The container's command line: the image's entry point, the pod's arguments, the ConfigMap's values."""
    values = load("configmap.yaml")["data"]
    for each in SERVER["env"]:
        field = each["valueFrom"]["resourceFieldRef"]
        assert field["containerName"] == SERVER["name"]
        values[each["name"]] = SERVER["resources"]["requests"][field["resource"].removeprefix("requests.")]
    used = {name for word in SERVER["args"] for name in re.findall(r"\$\((\w+)\)", word)}
    assert used == values.keys(), "each value is used, and each that is used is there"
    entry = IMAGE.stages[-1].one("ENTRYPOINT").exec_form
    return entry + [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in SERVER["args"]]


def test_the_containers_command_is_one_of_the_server() -> None:
    """Its options parse, and its port and paths are those that are declared and mounted."""
    options = serve_options(command())
    mounts, keys = {mount["mountPath"]: mount for mount in SERVER["volumeMounts"]}, Path(options["api_key_file"])
    assert [options["port"]] == [port["containerPort"] for port in SERVER["ports"]] and options["host"] == "0.0.0.0"
    assert mounts.keys() == {"/model", "/run/secrets/outrider", "/cache", "/tmp"}
    assert {volume["name"] for volume in POD["volumes"]} == {mount["name"] for mount in mounts.values()}
    assert mounts[options["bundle"]]["readOnly"] and mounts[str(keys.parent)]["readOnly"]
    assert keys.name in load("secret.example.yaml")["stringData"]
    assert SERVER["image"].split(":")[1] == project_version(ROOT)


def test_probes_ask_what_the_server_answers_without_a_key() -> None:
    """Paths that exist and need no key; the health check's file is in the image."""
    probes = [SERVER[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe")]
    assert {probe["path"] for probe in probes} == {"/health/live", "/health/ready"} <= set(PROBE_PATHS)
    assert {probe["port"] for probe in probes} == {"http"}
    assert SERVER["livenessProbe"]["exec"]["command"] == [*IMAGE.health_check, "--not-failed"]


def test_a_pod_drains_before_it_is_killed() -> None:
    """The grace period is above the wait for the endpoint's removal and the drain together."""
    waits_s = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"] + serve_options(command())["drain_s"]
    assert POD["terminationGracePeriodSeconds"] >= waits_s + 10


@pytest.mark.parametrize(
    "pod", [POD, *(template["spec"] for template in RAY_PODS.values())], ids=["deployment.yaml", *RAY_PODS]
)
def test_pods_run_without_rights(pod: dict[str, Any]) -> None:
    """Not as root, on a read-only file system, without capabilities and without a token of the cluster."""
    assert {"automountServiceAccountToken": False, "enableServiceLinks": False}.items() <= pod.items()
    assert not pod.keys() & {"hostNetwork", "hostPID"}
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    user, group = map(int, IMAGE.stages[-1].one("USER").text.split(":"))
    context = {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": group}
    closed = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert has(pod["securityContext"], context | {"seccompProfile": {"type": "RuntimeDefault"}})
    for container in pod["containers"]:
        assert has(container["securityContext"], closed)
        assert not any(each["name"] == "OUTRIDER_API_KEYS" for each in container["env"]), "keys are files"


def test_manifests_select_each_other() -> None:
    """Service, policy, budget and autoscaler mean the pods of the Deployment; names that are referred to exist."""
    labels, service = DEPLOYMENT["spec"]["template"]["metadata"]["labels"], load("service.yaml")["spec"]
    assert has(labels, DEPLOYMENT["spec"]["selector"]["matchLabels"])
    assert service["selector"] == load("networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert load("poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"] == labels
    scaled = {"kind": DEPLOYMENT["kind"], "name": DEPLOYMENT["metadata"]["name"]}
    assert has(load("horizontalpodautoscaler.yaml")["spec"]["scaleTargetRef"], scaled)
    named = [load(name)["metadata"]["name"] for name in ("serviceaccount.yaml", "secret.example.yaml")]
    secrets = [volume["secret"]["secretName"] for volume in POD["volumes"] if "secret" in volume]
    assert [POD["serviceAccountName"], *secrets] == named
    assert SERVER["envFrom"] == [{"configMapRef": {"name": load("configmap.yaml")["metadata"]["name"]}}]
    assert [port["targetPort"] for port in service["ports"]] == [SERVER["ports"][0]["name"]]
    assert service["sessionAffinity"] == "ClientIP", "drafts reach the pod of their session"


def test_the_autoscaler_asks_for_a_metric_that_the_server_has() -> None:
    """By the name at /metrics."""
    from tests.serving import serve_fake

    (metric,) = load("horizontalpodautoscaler.yaml")["spec"]["metrics"]
    with serve_fake() as server:
        body = httpx.get(server.url + "/metrics").text
    assert re.search(rf"^{metric['pods']['metric']['name']}[ {{]", body, re.MULTILINE)


def test_the_example_key_is_no_key_of_anybody() -> None:
    """It is long enough to start with, and says what it is."""
    keys = load("secret.example.yaml")["stringData"]["keys"].split()
    assert keys == ["replace-this-example-key"] and len(keys[0]) >= 16


RAY_FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        "upgradeStrategy",
        "rayClusterDeletionDelaySeconds",
        "excludeHeadPodFromServeSvc",
        "serveConfigV2",
        "rayClusterConfig",
    },
    "spec.rayClusterConfig": {
        "rayVersion",
        "enableInTreeAutoscaling",
        "authOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    },
    "spec.rayClusterConfig.headGroupSpec": {"rayStartParams", "template"},
    "spec.rayClusterConfig.workerGroupSpecs": {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    },
}
"""Fields of KubeRay 1.7's RayService v1 that are used, by the path of their object; a pod's are Kubernetes' own."""


def test_the_ray_service_has_known_fields_and_pods() -> None:
    """Its fields are in the list above, and its pods fit Kubernetes' schema strictly."""
    import kubernetes_validate

    assert (RAY["apiVersion"], RAY["kind"]) == ("ray.io/v1", "RayService")
    for path, known in RAY_FIELDS.items():
        objects: list[Any] = [RAY]
        for name in path.split(".") if path else ():
            found = [each[name] for each in objects]
            objects = [item for each in found for item in (each if isinstance(each, list) else [each])]
        assert all(each.keys() == known for each in objects), path
    for name, template in RAY_PODS.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, "1.37", strict=True)


def closed(schema: Any) -> Any:
    """A schema in which objects have no fields but those named, as an API server checks them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    is_open = inner.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in inner
    if inner.get("type") == "object" and "properties" in inner and not is_open:
        inner["additionalProperties"] = False
    if inner.get("x-kubernetes-int-or-string"):  # `pattern` is for its strings only
        inner = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": inner.get("pattern", "")}]}
    return inner


def test_the_ray_service_fits_kuberays_schema() -> None:
    """KubeRay's own definition of RayService v1, closed to unknown fields."""
    place = os.environ.get("OUTRIDER_KUBERAY_CRD")
    if not place:
        pytest.skip("OUTRIDER_KUBERAY_CRD names no file; see this module's docstring")
    import jsonschema

    definition = yaml.CSafeLoader(Path(place).read_text(encoding="utf-8")).get_single_data()
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    spec = load("ray-service.yaml")["spec"]
    jsonschema.Draft202012Validator(schema).validate(spec)
    spec["rayClusterConfig"]["headGroupSpec"]["raystartparams"] = {}
    with pytest.raises(jsonschema.ValidationError, match="raystartparams"):
        jsonschema.Draft202012Validator(schema).validate(spec)


def test_rays_ports_are_open_to_its_own_pods_and_the_operator_only() -> None:
    """Callers reach the server's port, and nothing but DNS and each other is reached."""
    policy = load("ray-networkpolicy.yaml")["spec"]
    own = policy["podSelector"]
    assert all(own["matchLabels"] == template["metadata"]["labels"] for template in RAY_PODS.values())
    (among, operator, callers), (to_own, dns) = policy["ingress"], policy["egress"]
    assert (among, to_own) == ({"from": [{"podSelector": own}]}, {"to": [{"podSelector": own}]})
    assert [peer["namespaceSelector"]["matchLabels"] for peer in operator["from"]] == [
        {"kubernetes.io/metadata.name": "kuberay-operator"}
    ]
    (of_plain_pods,) = load("networkpolicy.yaml")["spec"]["ingress"]
    assert callers["from"] == of_plain_pods["from"], "who may call, and who scrapes"
    assert callers["ports"] == [{"port": 8000, "protocol": "TCP"}] and {port["port"] for port in dns["ports"]} == {53}


APPLICATION = yaml.safe_load(RAY["spec"]["serveConfigV2"])


def test_the_ray_service_runs_the_image_with_its_ray() -> None:
    """The version of Ray is the extra's; head and workers are one image, whose paths are mounted."""
    assert f"ray[serve]=={CLUSTER['rayVersion']};" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (head,), (worker,) = (template["spec"]["containers"] for template in RAY_PODS.values())
    (application,) = APPLICATION["applications"]
    mounts = {mount["mountPath"] for mount in worker["volumeMounts"]}
    named = [Path(value) for value in application["args"].values() if str(value).startswith("/")]
    assert named and all(str(path) in mounts or str(path.parent) in mounts for path in named)
    assert head["image"] == worker["image"]


def test_every_worker_has_a_front_and_a_replica() -> None:
    """The Service reaches all workers, so each listens: as many fronts as workers, by a resource of each worker."""
    (application,) = APPLICATION["applications"]
    arguments, deployments = application["args"], {each["name"]: each for each in application["deployments"]}
    pod, options = RAY_PODS["worker"]["spec"], {name: each["ray_actor_options"] for name, each in deployments.items()}
    assert json.loads(json.loads(WORKERS["rayStartParams"]["resources"])) == {"front": 1, "verifier": 1}
    assert [options[name]["resources"] for name in ("front", "replicas")] == [{"front": 1}, {"verifier": 1}]
    numbers = [deployments[name]["num_replicas"] for name in ("front", "replicas")]
    assert {*numbers, WORKERS["maxReplicas"], arguments["replicas"]} == {WORKERS["replicas"]}
    (container,) = pod["containers"]
    (port,) = container["ports"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": port["name"]}
    assert (port["containerPort"], options["replicas"]["num_cpus"]) == (arguments["port"], arguments["threads"])
    assert sum(each["num_cpus"] for each in options.values()) <= int(container["resources"]["limits"]["cpu"])
    assert pod["terminationGracePeriodSeconds"] > arguments["drain_s"] + 30
    assert (arguments["host"], APPLICATION["proxy_location"]) == ("0.0.0.0", "Disabled")


@pytest.mark.parametrize("place", ["kubernetes/ray-service.yaml", "ray/serve.yaml"])
def test_the_ray_application_is_the_servers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve accepts both configurations; the builder makes an application of each, whose deployments they name."""
    schema = pytest.importorskip("ray.serve.schema", reason="Ray has no wheel here")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    text = (ROOT / "deploy" / place).read_text(encoding="utf-8")
    configured = yaml.safe_load(text) if place.startswith("ray/") else APPLICATION
    schema.ServeDeploySchema.model_validate(configured)
    (application,) = configured["applications"]
    assert (configured["proxy_location"], application["route_prefix"]) == ("Disabled", None)
    module, _, function = application["import_path"].partition(":")
    builder = getattr(importlib.import_module(module), function)
    front = builder(application["args"])._bound_deployment
    options, _, replicas = front.init_args
    make, *_ = replicas._bound_deployment.init_args
    assert isinstance(make, OpenReplica) and make.options.ray  # so that its prefixes are written at once
    assert make.options.api_key_file is None and replace(make.options, api_key_file=options.api_key_file) == options
    for wrong, message in (({"bogus": 1}, "'bogus' is no option"), ({"port": "high"}, "'port'")):
        with pytest.raises(ConfigError, match=message):
            builder({**application["args"], **wrong})
    made = {each.name: each for each in (front, replicas._bound_deployment)}
    for deployment in application.get("deployments", ()):
        cpus = made[deployment["name"]].ray_actor_options["num_cpus"]
        assert cpus == deployment["ray_actor_options"]["num_cpus"]
    given = str(application["args"]["replicas"])
    assert "-" in given or made["replicas"].num_replicas == int(given)
    named = {name: value for name, value in application["args"].items() if name != "replica_host"} | {"replicas": given}
    assert all(getattr(options, name) in (value, Path(str(value))) for name, value in named.items())
