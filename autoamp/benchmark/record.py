"""The measurements of each way, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoamp.benchmark.results import Result


@dataclass(frozen=True)
class Row:
    """One way to run the model at one batch size.  None stands for "not measured".

    Attributes:
        way: the name of the way: "fp32", "autocast", "autoamp", ".bfloat16()", ...
        kind: "fp32", "tf32", "autocast", "autoamp", "tuned" or "half".
        compiled: whether inductor compiled the way.
        batch: the number of samples in a step.
        error: the first line of the error at which the way failed; "" if it ran.
        seconds: the median time of a step.
        sigma: the standard deviation of the times, in seconds.
        ratio: the time over fp32's time, the median over the rounds.
        ratio_sigma: the standard deviation of the rounds' ratios.
        times: the time of each timed step, in seconds.
        data_seconds: the median of the part of a step that waited for data, in seconds.
        first_call: seconds of the first step, with its capture or compilation.
        samples: samples a second.
        tokens: tokens a second, where an input is a matrix of integers.
        peak: the most memory held at one time in a step, in bytes.
        saved: bytes saved for the backward.
        moved: bytes that the kernels of forward and backward read and write.
        casts: casts that forward and backward run.
        flops: flops of matrix products, convolutions and attention.
        low_flops: the part of `flops` in fp16 or bf16.
        losses: the loss of each of the first steps.
        growth: the time of a step of twice the batch over that of this batch; measured
            only for fp32 and autoamp, if autoamp gains little.
        joules: energy of a step.
        energy_from: "nvml", "rapl", or "estimate" from bytes and flops; "" for none.
        co2_grams: CO2 of 1,000 steps, in grams.
        largest_batch: the largest batch within the memory budget.
    """

    way: str
    kind: str
    compiled: bool = False
    batch: int | None = None
    error: str = ""
    seconds: float | None = None
    sigma: float | None = None
    ratio: float | None = None
    ratio_sigma: float | None = None
    times: tuple[float, ...] = field(default=(), repr=False)
    data_seconds: float | None = None
    first_call: float | None = None
    samples: float | None = None
    tokens: float | None = None
    peak: int | None = None
    saved: int | None = None
    moved: int | None = None
    casts: int | None = None
    flops: int | None = None
    low_flops: int | None = None
    losses: tuple[float, ...] = ()
    growth: float | None = None
    joules: float | None = None
    energy_from: str = ""
    co2_grams: float | None = None
    largest_batch: int | None = None

    @property
    def loss(self) -> float | None:
        """The loss of the last of the first steps."""
        return self.losses[-1] if self.losses else None


@dataclass(frozen=True)
class Evidence:
    """Figures from the report of the converted model that explain its times.

    Shares are of the predicted fp32 time of forward and backward, 0 to 1, and None
    where no time is predicted.

    Attributes:
        pays: whether the device computes faster in the compute dtype than in fp32.
        units: the name of the device's figures.
        arrived: the half dtype in which most of the model's weights arrived, or "".
        float_ops, low_ops: the number of float ops, and of float ops that run low.
        ruled: the share in ops that the user's own rules keep in fp32; where no time
            is predicted, the share of these ops among all float ops.
        ruled_by: the reason of the costliest of these ops.
        stayed: the share in all ops that stay in fp32.
        stayed_because: the reason of the costliest op that stays in fp32.
        launches, memory, arithmetic: the shares of starting ops, of moving bytes, and
            of computing products.
        speed_up: how many times as fast as fp32 the graphs are predicted to be.
        odd_flops: the share of the low products' flops in which a size is no multiple
            of 8; 0 where the device has no tensor cores.
        odd_size, odd_next, odd_module: the size of the largest of these products, the
            next multiple, and the module.
    """

    pays: bool
    units: str
    arrived: str = ""
    float_ops: int = 0
    low_ops: int = 0
    ruled: float = 0.0
    ruled_by: str = ""
    stayed: float | None = None
    stayed_because: str = ""
    launches: float | None = None
    memory: float | None = None
    arithmetic: float | None = None
    speed_up: float | None = None
    odd_flops: float = 0.0
    odd_size: int = 0
    odd_next: int = 0
    odd_module: str = ""


@dataclass(frozen=True, repr=False)
class Measured(Result):
    """The measurements: the ways, and the machine.

    Attributes:
        label: the model's class name.
        device: the hardware.
        torch: the version of torch.
        precision: the compute dtype of the low ways: "bf16" or "fp16".
        work: "training", "inference" or "generate N".
        loss_from: how the loss was made, in words; "" where nothing was trained.
        rows: the ways, fp32 first; all ways of a batch size stand together.
        rounds: how many steps of each way were timed.
        interleaved: whether all ways of a batch size were timed in turn.
        memory_how: how the peak memory was measured.
        energy_how: how the energy was measured, or why it was not.
        evidence: figures from the report of the converted model that explain the times;
            None if autoamp did not run.
        notes: sentences that qualify the figures.
        complete: False if the measurement was interrupted.
        measured_seconds: how long the measurement took.
    """

    label: str
    device: str
    torch: str
    precision: str
    work: str
    loss_from: str
    rows: tuple[Row, ...]
    rounds: int
    interleaved: bool
    memory_how: str
    energy_how: str
    evidence: Evidence | None = None
    notes: tuple[str, ...] = ()
    complete: bool = True
    measured_seconds: float = 0.0

    def row(self, way: str, batch: int | None = None) -> Row:
        """The row of a way.

        Args:
            batch: the batch size; by default the first that was measured.

        Raises:
            KeyError: there is no such row.
        """
        for row in self.rows:
            if row.way == way and batch in (None, row.batch):
                return row
        raise KeyError(f"no row {way!r}; there are {[r.way for r in self.rows]}")

    @property
    def batches(self) -> tuple[int | None, ...]:
        """The batch sizes that were measured."""
        return tuple(dict.fromkeys(row.batch for row in self.rows))
