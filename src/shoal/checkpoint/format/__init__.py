"""The checkpoint format: manifest, index, part, COMMIT. NumPy only, like `plan`.

`docs/checkpoint-format.md` is the specification; these files read and write it. Input is
untrusted: every value is validated before use, and no code is executed.

* `records`: the records, and names of files.
* `json_files`: manifest and COMMIT. `table_files`: part and index.
* `tiling`: check that chunks fill every leaf.

Knows the tree of a state; does not know files on disk, nor which process writes them.
"""
