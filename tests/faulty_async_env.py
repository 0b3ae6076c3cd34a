"""faulty_env.py with async functions, and the faults of an event loop."""

import asyncio

import faulty_env


async def exit_in_a_task():
    await asyncio.create_task(exits())


async def exits():
    raise SystemExit(3)


async def stop_the_loop():
    asyncio.get_running_loop().stop()
    raise ValueError


async def wait_for_ever():
    await asyncio.Event().wait()


LOOP_FAULTS = {"task": exit_in_a_task, "stop": stop_the_loop, "wait": wait_for_ever}
BLOCKING = ("endless", "stubborn", "sleep")  # they cost other trajectories too
FAULTS = {**faulty_env.FAULTS, **LOOP_FAULTS}
FAULTS = {name: fault for name, fault in FAULTS.items() if name not in BLOCKING}


async def interact(messages, fault):
    return faulty_env.interact(messages, fault)


async def reward_fn(messages, fault):
    if fault in LOOP_FAULTS:
        return await LOOP_FAULTS[fault]()
    return faulty_env.reward_fn(messages, fault)
