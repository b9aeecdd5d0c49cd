"""The checks of `shoal doctor`: small functions that return facts and findings, and print nothing.

Knows `startup` and what is below it. Does not know how findings are shown, nor starts a job of its
own: it joins the one that this process's launcher shows, and leaves it.
"""
