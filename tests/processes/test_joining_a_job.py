"""Real processes join, compute, meet and leave, without a launcher."""

from __future__ import annotations

import signal

import pytest

AGAIN = (
    "initialize was called before, with other arguments (script{0}.py:10)\n"
    "before: initialize({1}, virtual_devices=2)\n"
    "now:    initialize({1}, local_device_ids=[0], virtual_devices=4)\n"
    "virtual_devices: 2 before, 4 now\n"
    "local_device_ids: not given before, (0,) now\n"
    "this is process {0} of 2; call shutdown() first to join another job"
)


def test_two_processes_compute_and_leave_quietly(job, said):
    script = """
    before = signal.getsignal(signal.SIGTERM)
    initialize()
    say(process.process_index(), process.process_count(), global_sum())
    barrier("here")
    initialize(timeout_s=20)  # again, and nothing is sent
    try:
        initialize(virtual_devices=4, local_device_ids=[0])
    except InitializeError as error:
        say(error)
    import jax
    say(signal.getsignal(signal.SIGTERM) == before, jax.local_device_count(), jax.device_count())
    process.shutdown()
    import atexit
    atexit.register(lambda: say("ends", process.process_index(), process.process_count()))
    for ask in (process.client, lambda: barrier("alone")):
        try:
            ask()
        except InitializeError as error:
            say(error)
    """
    left = (
        "this process has left its job, in which it was process {} of 2: shutdown() was called\n"
        "make collective calls before that, or call initialize() to join a job again"
    )
    ended = job.run(2, script)
    numbers = "coordinator_address={!r}, num_processes=2, process_id={}"
    for index, one in enumerate(ended):
        assert (one.code, one.err) == (0, ""), one
        assert said(one).splitlines() == [
            f"{index} 2 6.0",
            *AGAIN.format(index, numbers.format(job.address, index)).splitlines(),
            "True 2 4",
            *2 * [*left.format(index).splitlines()],
            f"ends {index} 2",
        ]
    assert job.leaves_no_orphan()


def test_the_arguments_of_jax_distributed(job, said, tmp_path):
    """By position, the partition that JAX gets, and the time limit of leaving."""
    script = f"""
    import pathlib, time
    from jax._src import distributed
    mark = pathlib.Path({str(tmp_path / "late")!r})
    process.initialize(address, count, index, None, virtual_devices=1, initialization_timeout=30,
                       shutdown_timeout_seconds=1, partition_index=index,
                       cluster_detection_method="deactivate")
    say(global_sum(), distributed.global_state.partition_index)
    if index == 0:
        try:
            process.shutdown()
        except DeadlineError as error:
            say("1 s" in str(error))
        mark.touch()
    while not mark.exists():
        time.sleep(0.01)
    """
    ended = job.run(2, script)
    assert [said(one) for one in ended] == ["1.0 0\nTrue", "1.0 1"], ended


def test_initialize_again_accepts_a_subset_of_the_arguments(job, said):
    """What is not given contradicts nothing."""
    script = """
    initialize()
    for part in ({}, {"process_id": index}, {"num_processes": 2}, {"coordinator_address": address}):
        process.initialize(**part)
    try:
        process.initialize(num_processes=3, coordinator_address="h:1")
    except InitializeError as error:
        say(*str(error).splitlines()[3:5])
    """
    for one in job.run(2, script):
        assert (one.code, one.err) == (0, ""), one
        address = f"coordinator_address: {job.address} before, h:1 now"
        assert said(one) == f"num_processes: 2 before, 3 now {address}"


def test_initialize_again_accepts_the_values_of_the_launcher(job, said):
    """Without an address: this launcher's processes meet in a directory of this host."""
    script = """
    process.initialize(virtual_devices=1)
    process.initialize(num_processes=2, process_id=index)
    process.initialize()
    try:
        process.initialize(coordinator_address=address)
    except InitializeError as error:
        say(str(error).splitlines()[3])
    barrier("here")
    """
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for index in (0, 1):
        job.start(index, 2, script, **mpi, OMPI_COMM_WORLD_RANK=str(index))
    for one in job.wait():
        assert (one.code, one.err) == (0, ""), one
        assert said(one) == f"coordinator_address: not given before, {job.address} now"


def test_a_program_that_just_ends_needs_no_shutdown(job, said):
    script = """
    initialize()
    import atexit
    @atexit.register
    def last():
        say("my own exit handler")
    say(global_sum())
    try:
        sys.exit(3)
    except SystemExit:
        pass
    """
    for one in job.run(2, script):
        assert (one.code, one.err) == (0, ""), one
        assert said(one).splitlines() == ["6.0", "my own exit handler"]
        assert one.ended_s < 30
    assert job.leaves_no_orphan()


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ({0: 3, 1: 3}, "process 2 of 3 did not join"),
        ({0: 2, 1: 3}, "3"),
    ],
    ids=["missing peer", "wrong count"],
)
def test_contradicting_jobs_raise_on_every_process(job, who, words):
    script = "initialize(timeout_s=8)\n"
    for index, count in who.items():
        job.start(index, count, script)
    for one in job.wait():
        assert one.code == 74, one
        assert "Traceback" not in one.err, one
        assert words in " ".join(one.err.split()), one
        assert one.ended_s < 30
    assert job.leaves_no_orphan()


@pytest.mark.parametrize("twice", [0, 1])
def test_an_index_that_comes_twice_is_an_error_on_every_process(job, twice):
    for index in (0, 1, twice):
        job.start(index, 3, "initialize(timeout_s=20)\n")
    for one in job.wait():
        assert one.code == 74, one
        assert "Traceback" not in one.err, one
        assert f"two processes have the index {twice}" in " ".join(one.err.split()), one
        assert one.ended_s < 15, one
    assert job.leaves_no_orphan()


def test_joining_without_a_listener_is_reported(job):
    job.start(1, 2, "initialize(timeout_s=1)\n")
    (one,) = job.wait()
    assert one.code == 74, one
    said = " ".join(one.err.split())
    assert f"cannot join the job at {job.address}: nothing listens there" in said
    assert "  To check the address from this host: shoal doctor\n" in one.err


def test_a_port_that_is_taken_is_an_error_of_process_0(job):
    script = """
    import socket
    host, port = address.split(":")
    taken = socket.create_server((host, int(port)))
    initialize(timeout_s=20)
    """
    job.start(0, 2, script)
    (one,) = job.wait()
    assert one.code == 74, one
    assert "in use" in one.err
    assert job.address in one.err


def test_initialize_after_devices_were_started_raises(job, said):
    script = """
    import jax
    jax.config.update("jax_num_cpu_devices", 3)
    jax.devices()
    for options in ({}, {"num_processes": 1, "process_id": 0}):
        try:
            initialize(**options)
        except InitializeError as error:
            say(str(error).splitlines()[0])
    process.initialize(num_processes=1, virtual_devices=3)
    say(process.process_count(), len(jax.devices()))
    process.shutdown()
    raise InitializeError("the exit code is the error's")
    """
    job.start(0, 2, script)
    (one,) = job.wait()
    assert one.code == 74, one
    assert said(one).splitlines() == [
        "too late to join a job of 2: JAX has created its devices",
        "too late for virtual_devices=2: JAX has created its devices",
        "1 3",
    ]


def test_attach_to_a_job_that_jax_joined(job, said):
    script = """
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, count, index)
    try:
        process.process_count()
    except InitializeError as error:
        say(error)
    process.initialize(timeout_s=30)
    barrier("attached")
    say(process.process_index(), process.process_count(), global_sum())
    process.shutdown()
    process.initialize(timeout_s=30)
    barrier("attached again")
    """
    for index, one in enumerate(job.run(2, script)):
        assert one.code == 0, one
        assert "Traceback" not in one.err, one
        assert said(one).splitlines() == [
            "jax.distributed.initialize made this process one of 2, but it has not joined them in "
            "shoal: call shoal.initialize() after it",
            f"{index} 2 6.0",
        ]
    assert job.leaves_no_orphan()


def test_one_job_after_the_other_at_one_address(job, said):
    script = """
    for number in range(3):
        initialize()
        barrier("here")
        process.shutdown()
        say(number)
    """
    for one in job.run(2, script):
        assert (one.code, one.err) == (0, ""), one
        assert said(one).split() == ["0", "1", "2"]
    assert job.leaves_no_orphan()


def test_death_of_process_0_while_joining_ends_the_wait(job):
    script = """
    from shoal.runtime.startup import coordinator_address
    coordinator_address.join = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    initialize()
    """
    job.start(0, 2, script)
    job.start(1, 2, "initialize(timeout_s=45)\n")
    _, waiting = job.wait()
    assert waiting.code == 74, waiting
    assert "process 0 never joined" in " ".join(waiting.err.split())
    assert waiting.ended_s < 30
    assert job.leaves_no_orphan()


def test_process_that_catches_a_failed_start_continues_without_the_services(job):
    script = """
    from shoal.runtime.jax_service import jax_runtime
    install = jax_runtime.install
    def install_and_die(*who):
        install(*who)
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    jax_runtime.install = install_and_die
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        initialize()
    except InitializeError as error:
        say("caught", *error.missing)
    signal.sigwait([signal.SIGUSR1])
    say(global_sum())
    """
    survivor = job.start(0, 2, script)
    job.start(1, 2, script)
    for text in survivor.stdout:
        if text.startswith("> caught"):
            break
    assert text == "> caught 1\n"
    assert job.leaves_no_orphan(of="shoal.runtime.")
    survivor.send_signal(signal.SIGUSR1)
    one, _ = job.wait()
    assert (one.code, one.err) == (0, ""), one
    assert "> 1.0" in one.out


def test_a_peer_that_dies_before_the_devices_are_connected(job, said):
    script = """
    import os
    from shoal.runtime.client.over_tcp import join
    from shoal.runtime.startup.job_token import find_token
    if index == 1:
        token = find_token("job", address).secret
        join(address, process=1, num_processes=2, token=token, timeout_s=30)
        os._exit(0)
    initialize()
    """
    one, _ = job.run(2, script)
    assert one.code == 74, one
    assert "process 1 (" in " ".join(one.err.split()), one
    assert job.leaves_no_orphan()


def test_a_web_proxy_is_not_asked_for_this_host(job, said):
    script = "initialize()\nsay(global_sum())\n"
    nowhere = "http://127.0.0.1:1"
    for one in job.run(2, script, http_proxy=nowhere, grpc_proxy=nowhere, no_proxy="example.org"):
        assert (one.code, one.err) == (0, ""), one
        assert said(one) == "6.0"
