"""What packs a file, by its suffix."""

import gzip
import lzma

PACKERS = {".gz": gzip.compress, ".xz": lzma.compress}
try:
    import zstandard

    PACKERS[".zst"] = zstandard.compress
except ImportError:  # an extra
    pass
