"""Process 1 reaches the first barrier, and never the second."""

import time

import shoal

shoal.initialize()
shoal.barrier("start")
if shoal.process_index() == 1:
    time.sleep(3600)
shoal.barrier("data is ready", timeout_s=5)
