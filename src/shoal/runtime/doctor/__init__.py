"""The checks of `shoal doctor`: small functions that return facts and findings, and print nothing.

Knows `startup` and what is below it. Does not know how findings are shown, nor starts a job of its
own: it joins and leaves the one described by this process's launcher.
"""
