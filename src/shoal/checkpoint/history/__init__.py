"""The steps of a run: saved during training, kept by a policy, resumed.

Knows the directories beside it, none of which knows it. Does not know how a step is saved or
restored.
"""
