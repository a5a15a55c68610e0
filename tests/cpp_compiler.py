"""Whether torch.compile can compile C++ here."""

import shutil
import tempfile

import pytest

# torch splits the compiler's command at spaces, also inside the names of temporary files.
HAS_CPP = bool(shutil.which("g++") or shutil.which("clang++")) and " " not in tempfile.gettempdir()
needs_cpp = pytest.mark.skipif(not HAS_CPP, reason="needs a C++ compiler, and a TMPDIR without spaces")
