"""What autograd does not tell through its public interface."""
import torch


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing is recomputing its activations.

    Something that counts or collects once per forward asks this to count checkpointed layers once. It is true under
    reentrant and non-reentrant checkpointing. In a traced or compiled forward, which has no Python code left that
    could count, it is false.
    """
    if torch.compiler.is_compiling():
        return False
    # Private, so it may go: then recomputed forwards look like any other. -1 stands for "no backward in this thread".
    graph_task_id = getattr(torch._C, '_current_graph_task_id', None)
    return graph_task_id is not None and graph_task_id() != -1
