"""Write the samples of class folders as parquet files and tar shards."""

import io
import json
import tarfile

import pytest


def write_parquet(root, samples, names, split="train", row_group=3, metadata=None):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = pa.array([{"bytes": data, "path": f"{i}.png"} for i, (data, _) in enumerate(samples)])
    table = pa.table({"image": images, "label": pa.array([label for _, label in samples])})
    if names:
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        metadata = json.dumps(features).encode()
    if metadata is not None:
        table = table.replace_schema_metadata({b"huggingface": metadata})
    root.mkdir(exist_ok=True)
    pq.write_table(table, root / f"{split}-00000-of-00001.parquet", row_group_size=row_group)


def write_table(root, split="train", **columns):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), root / f"{split}.parquet")


def write_members(path, members, mode="w", **options):
    with tarfile.open(path, mode, **options) as tar:
        for name, content, *kind in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if kind:
                (member.type,), member.linkname = kind, "elsewhere"
            tar.addfile(member, io.BytesIO(content))


def write_tar(root, samples, split="train", shard=5):
    root.mkdir(exist_ok=True)
    for start in range(0, len(samples), shard):
        pairs = enumerate(samples[start : start + shard], start)
        members = [((f"{i:04d}.png", data), (f"{i:04d}.cls", str(label).encode())) for i, (data, label) in pairs]
        write_members(root / f"{split}-{start:04d}.tar", [member for pair in members for member in pair])


def encoded(folders, split):
    root = folders / split
    classes = sorted(p.name for p in root.iterdir())
    return [(p.read_bytes(), k) for k, name in enumerate(classes) for p in sorted((root / name).iterdir())]
