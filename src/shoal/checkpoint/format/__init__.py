"""What the files of a checkpoint say: manifest, index, part, COMMIT. NumPy only, like `plan`.

`docs/checkpoint-format.md` is the norm; these files read and write it. What is read may come from
an enemy: nothing is believed before it was checked, and no code runs.

* `records`: what there is to say; names of files.
* `json_files`: manifest and COMMIT. `table_files`: part and index.
* `tiling`: do the chunks fill every leaf?

Knows the tree of a state; does not know files on disk, nor who writes them.
"""
