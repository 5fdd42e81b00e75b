"""The entry point of a SageMaker training job: it becomes torchrun on each of the job's hosts.

    estimator = PyTorch(entry_point="sagemaker_entry.py", source_dir="launchers", …,
                        hyperparameters={"root": "s3://bucket/run"})

Without `root`, a job of one host saves to /opt/ml/checkpoints. SageMaker copies that to the S3 path
of `checkpoint_s3_uri`, and brings it back before a restart. Hosts of a larger job do not see each
other's directory: they need a `root` on FSx or S3.
"""

import argparse
import json
import os
import sys

LOCAL = "/opt/ml/checkpoints"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", default=LOCAL, help=f"where to save (default {LOCAL})")
    parser.add_argument("--steps", default="1000")
    args = parser.parse_args()
    hosts = json.loads(os.environ["SM_HOSTS"])
    if len(hosts) > 1 and args.root.startswith(LOCAL):
        sys.exit(
            f"{len(hosts)} hosts do not share {args.root}. "
            "What to do: pass root= with a path on FSx, or s3://bucket/prefix"
        )
    here = hosts.index(os.environ["SM_CURRENT_HOST"])
    processes = int(os.environ.get("SM_NUM_GPUS", "0")) or int(os.environ["SM_NUM_CPUS"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
    torchrun += ["--node-rank", str(here), "--nproc-per-node", str(processes)]
    torchrun += ["--master-addr", hosts[0]]  # with torchrun's default port, 29500
    # this process becomes torchrun, so that SageMaker's SIGTERM reaches it
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
    os.execv(sys.executable, [*torchrun, script, args.root, args.steps])


if __name__ == "__main__":
    main()
