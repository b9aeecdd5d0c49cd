"""Schedules of collectives over links, and the cost of each stage.

Knows the hardware; knows no mesh: `plan.cost` maps axes onto it.
"""
