"""Flip one bit of the largest file in a directory: python flip.py DIRECTORY"""

import sys
from pathlib import Path

files = [path for path in Path(sys.argv[1]).rglob("*") if path.is_file()]
largest = max(files, key=lambda path: path.stat().st_size)
content = bytearray(largest.read_bytes())
content[100_000] ^= 0x40
largest.write_bytes(content)
