"""Steps as messages: what a runner has to know of a plan, without the scheduler's sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.batch.builder import Samples, StepArrays
from jaxinfer.batch.compile_plan import CompilePlan
from jaxinfer.batch.packing import Packing
from jaxinfer.hosts import wire
from jaxinfer.kv_cache.manager import BlockCopy
from jaxinfer.request import Request, Sequence
from jaxinfer.runner.device_sampler import admissions
from jaxinfer.runner.protocol import Masks
from jaxinfer.scheduler.plan import ScheduledRow, StepPlan


def pack_step(
    gang: str, number: int, plan: StepPlan, arrays: StepArrays, compiled: CompilePlan, sample: bool
) -> wire.Step:
    """The message for a step.

    Args:
        compiled: all shapes; the step's own go along, as both sides have to find the same.
        sample: the sampler is dispatched at once.
    """
    samples = arrays.samples
    of_row = np.repeat(np.arange(len(plan.rows)), [row.num_samples for row in plan.rows])
    columns = (of_row, samples.tokens, samples.positions, samples.drafts, samples.before)
    indices = {id(seq): seq.index for seq in plan.admitted}
    return wire.Step(
        gang=gang,
        number=number,
        sample=sample,
        token_bucket=arrays.token_bucket,
        row_bucket=_row_bucket(compiled, len(samples.rows)),
        packed=arrays.packed.tobytes(),
        rows=[wire.Row(row.seq.slot, row.start, row.num_tokens, row.samples) for row in plan.rows],
        samples=np.stack([np.asarray(column, np.int32) for column in columns]).tobytes(),
        admitted=[
            wire.Admitted(
                slot=new.slot,
                index=indices[id(seq)],
                key=new.key,
                prompt=_pack(new.request.prompt_token_ids),
                output=_pack(new.output_token_ids),
                params=new.request.params,
                bad_words=new.request.bad_words,
                pooling=new.request.pooling,
            )
            for seq, new in zip(plan.admitted, admissions(plan), strict=True)
        ],
        copies=[(copy.group, copy.source, copy.target) for copy in plan.copies],
    )


def pack_masks(masks: Masks) -> dict[int, bytes]:
    return {index: np.ascontiguousarray(mask_X, np.uint32).tobytes() for index, mask_X in masks.items()}


def unpack_masks(masks: Mapping[int, bytes]) -> dict[int, np.ndarray]:
    return {index: np.frombuffer(data, np.uint32) for index, data in masks.items()}


@dataclass
class StepReader:
    """Turns messages into the plans that they were made of, with sequences that know what runners ask for.

    Attributes:
        compiled: all shapes.
    """

    compiled: CompilePlan
    _slots: dict[int, Sequence] = field(default_factory=dict)

    def read(self, step: wire.Step) -> tuple[StepPlan, StepArrays]:
        """Raises:
        ValueError: the step's shapes are not those that this process has compiled for.
        """
        packed = np.frombuffer(step.packed, np.int32)
        of_row, *columns = np.frombuffer(step.samples, np.int32).reshape(5, -1)
        self._check_shapes(step, len(packed), len(of_row))
        admitted = tuple(self._admit(new) for new in step.admitted)
        rows = tuple(
            ScheduledRow(self._slots[row.slot], row.start, row.num_tokens, row.samples, 0, 0)
            for row in step.rows
        )
        samples = Samples(tuple(rows[index] for index in of_row.tolist()), *columns)
        plan = StepPlan(rows, admitted, tuple(BlockCopy(*copy) for copy in step.copies), 0)
        return plan, StepArrays(step.token_bucket, packed, samples)

    def _check_shapes(self, step: wire.Step, size: int, num_samples: int) -> None:
        own: tuple[int, int, int] | None = None
        if step.token_bucket in self.compiled.token_buckets:
            own = (
                self.compiled.tokens(sum(row.num_tokens for row in step.rows)),
                Packing.make(self.compiled, step.token_bucket).size,
                _row_bucket(self.compiled, num_samples),
            )
        if own != (step.token_bucket, size, step.row_bucket):
            raise ValueError(
                f"step {step.number} of rank 0 has the shapes {(step.token_bucket, size, step.row_bucket)}, "
                f"where this rank finds {own}"
            )

    def _admit(self, new: wire.Admitted) -> Sequence:
        request = Request(
            request_id="",
            prompt=None,
            prompt_token_ids=_unpack(new.prompt),
            params=new.params,
            bad_words=new.bad_words,
            pooling=new.pooling,
        )
        seq = Sequence(
            request=request,
            index=new.index,
            order=0,
            max_tokens=0,
            key=new.key,
            num_groups=self.compiled.num_groups,
            output_token_ids=list(_unpack(new.output)),
            slot=new.slot,
        )
        self._slots[new.slot] = seq
        return seq


def _row_bucket(compiled: CompilePlan, num_samples: int) -> int:
    return compiled.rows(num_samples) if num_samples else 0


def _pack(token_ids: tuple[int, ...]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, np.int32).tolist())
