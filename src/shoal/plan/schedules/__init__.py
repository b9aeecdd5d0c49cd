"""How collectives run over links, and what each stage of one costs.

Knows the hardware; knows no mesh: `plan.cost` maps axes onto it.
"""
