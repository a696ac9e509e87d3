"""Devices that belong to several processes."""

import jax

_HEARTBEAT = 3600
"""Seconds of silence after which JAX ends all processes. Who uses them finds out much earlier, and better: JAX also
counts the time in which all of them were stopped."""


def join_processes(host: str, port: int, count: int, rank: int, timeout: float) -> None:
    """Makes the devices of all processes known to each of them; before any other use of JAX.

    A CPU process has one device: programs of several CPU devices in several processes can wait for each other forever
    if they are not awaited one by one.

    Args:
        host, port: where rank 0 serves JAX's coordination.
        timeout: seconds in which all processes have to appear.
    """
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    jax.config.update("jax_num_cpu_devices", 1)
    local = host in ("localhost", "::1") or host.startswith("127.")
    shown = f"[{host}]" if ":" in host else host
    jax.distributed.initialize(
        f"{shown}:{port}",
        count,
        rank,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout),
        heartbeat_timeout_seconds=_HEARTBEAT,
        shutdown_timeout_seconds=5,
        coordinator_bind_address=f"{shown if local else '[::]'}:{port}",
    )


def leave_processes() -> None:
    """Waits until all processes have come here, and closes the connections."""
    jax.distributed.shutdown()


def shared_devices(count: int) -> list[jax.Device]:
    """The devices for a mesh of ``count`` devices: all there are in one process; as many of each, process by process,
    in several.

    Raises:
        ValueError: a process has too few.
    """
    devices, processes = jax.devices(), jax.process_count()
    if processes == 1:
        return devices
    each = count // processes
    chosen: list[jax.Device] = []
    for rank in range(processes):
        own = [device for device in devices if device.process_index == rank]
        if len(own) < each:
            raise ValueError(
                f"parallel.tensor x parallel.expert is {count}, {each} devices in each of {processes} processes, but "
                f"rank {rank} has {len(own)} of platform {own[0].platform!r}"
                + ("; a CPU process has one" if own[0].platform == "cpu" else "")
            )
        chosen += own[:each]
    return chosen
