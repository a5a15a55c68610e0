"""The same small data set in each format."""

import pytest
from formats import encoded, write_parquet, write_tar

from small_runs import class_folders


@pytest.fixture
def folders(tmp_path):
    return class_folders(tmp_path / "folders")


@pytest.fixture(params=["folders", "parquet", "tar"])
def any_format(request, folders, tmp_path):
    if request.param == "folders":
        return folders
    for split in ("train", "val"):
        if request.param == "parquet":
            write_parquet(tmp_path / "parquet", encoded(folders, split), ["cat", "dog", "owl"], split)
        else:
            write_tar(tmp_path / "tar", encoded(folders, split), split)
    (tmp_path / request.param / "classes.txt").write_text("cat\ndog\nowl\n")
    return tmp_path / request.param
