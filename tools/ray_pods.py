"""Write the pods of a RayService as plain Pods, which tools that do not know KubeRay's kinds can check."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml


def main() -> None:
    (service,) = yaml.safe_load_all(Path(sys.argv[1]).read_text())
    cluster = service["spec"]["rayClusterConfig"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": group["template"]["spec"]}
        for number, group in enumerate([cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])
    ]
    # Without anchors, which not every reader of YAML knows.
    sys.stdout.write("---\n".join(yaml.dump(pod, Dumper=_Plain) for pod in pods))


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


if __name__ == "__main__":
    main()
