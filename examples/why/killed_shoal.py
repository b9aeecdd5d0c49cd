"""Four processes train. Process 2 is killed in step 50."""

import os
import signal

import shoal

shoal.initialize()
for step in range(100):
    with shoal.step(step):
        if step == 50 and shoal.process_index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        shoal.barrier("step")
