"""A call of each op that autocast runs in fp32, or in the widest dtype it is given.

Each takes the results of two linear layers, both (ROWS, WIDTH), which are low under
autocast.  Constants are integers, which widen nothing: a constant in the dtype of an
operand would be fp32 where the call is captured, and low where autocast runs it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, WIDTH = 32, 16

Call = Callable[[Tensor, Tensor], Tensor]


def inside(a: Tensor) -> Tensor:
    """Numbers between 0.1 and 0.9."""
    return a.sigmoid() * 0.8 + 0.1


def pair(a: Tensor) -> Tensor:
    return a.view(2, WIDTH, WIDTH)


def square(a: Tensor) -> Tensor:
    """Two matrices that have inverses."""
    return pair(a) + 5 * torch.eye(WIDTH).long()


def positive(a: Tensor) -> Tensor:
    """Two symmetric matrices with positive eigenvalues that lie apart."""
    m = pair(a) * 0.1
    return m + m.mT + torch.diag(torch.arange(3, 3 + WIDTH))


def line(a: Tensor) -> Tensor:
    return a.view(ROWS, 1, WIDTH)


def image(a: Tensor) -> Tensor:
    return a.view(8, 4, 4, 4)


def volume(a: Tensor) -> Tensor:
    return a.view(2, 4, 4, 4, 4)


def threes(a: Tensor) -> Tensor:
    """Vectors of three numbers, which come from all columns."""
    return a.flatten()[: 3 * (a.numel() // 3)].view(-1, 3)


def reflections(b: Tensor) -> Tensor:
    """A factor for each reflection that a matrix of `pair` holds."""
    return pair(b)[..., 0].tanh()


def middle(a: Tensor, *shape: int) -> Tensor:
    """Constants that an op wants in fp32, and the truth in float64."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.full(shape, 0.5, dtype=wide)


def classes(a: Tensor) -> Tensor:
    return torch.arange(a.shape[0]) % WIDTH


def signs(a: Tensor) -> Tensor:
    return torch.arange(a.shape[0]) % 2 * 2 - 1


def grid(a: Tensor) -> Tensor:
    """Where to look in eight images of 4 by 4."""
    return a.tanh().view(8, 4, 4, 4)[..., :2]


def labels(a: Tensor) -> Tensor:
    return classes(a)[:, None].repeat(1, WIDTH)


OF_BOTH: dict[str, Call] = {
    "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(
        a, b.sigmoid(), reduction="none"
    ),
    "cdist": torch.cdist,
    "cosine_embedding_loss": lambda a, b: F.cosine_embedding_loss(
        a, b, signs(a), reduction="none"
    ),
    "grid_sampler": lambda a, b: F.grid_sample(image(a), grid(b), align_corners=False),
    "hinge_embedding_loss": lambda a, b: F.hinge_embedding_loss(
        a, signs(a)[:, None], reduction="none"
    ),
    "huber_loss": lambda a, b: F.huber_loss(a, b, reduction="none"),
    "kl_div": lambda a, b: F.kl_div(a, inside(b), reduction="none"),
    "l1_loss": lambda a, b: F.l1_loss(a, b, reduction="none"),
    "margin_ranking_loss": lambda a, b: F.margin_ranking_loss(
        a, b, signs(a)[:, None], reduction="none"
    ),
    "mse_loss": lambda a, b: F.mse_loss(a, b, reduction="none"),
    "multi_margin_loss": lambda a, b: F.multi_margin_loss(
        a, classes(a), reduction="none"
    ),
    "multilabel_margin_loss": lambda a, b: F.multilabel_margin_loss(
        a, labels(a), reduction="none"
    ),
    "nll_loss": lambda a, b: F.nll_loss(a, classes(a), reduction="none"),
    "nll_loss2d": lambda a, b: F.nll_loss(
        a.view(2, WIDTH, 4, 4), torch.ones(2, 4, 4).long(), reduction="none"
    ),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, inside(b), reduction="none"),
    "prod": lambda a, b: inside(a)[:1, :4].prod(),
    "prod.dim_int": lambda a, b: inside(a).view(-1, 4).prod(-1),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(
        a, signs(a)[:, None].expand(ROWS, WIDTH), reduction="none"
    ),
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(
        a, b, a.roll(1, 0), reduction="none"
    ),
}

UNARY = "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan"

OF_CUDA: dict[str, Call] = {
    **{
        name: (lambda a, b, n=name: getattr(torch, n)(inside(a)))
        for name in UNARY.split()
    },
    "pow.Tensor_Scalar": lambda a, b: a**2,
    "pow.Tensor_Tensor": lambda a, b: inside(a) ** b,
    "pow.Scalar": lambda a, b: 2**a,
    "softplus": lambda a, b: F.softplus(a),
    "layer_norm": lambda a, b: F.layer_norm(a, (WIDTH,)),
    "native_layer_norm": lambda a, b: torch.native_layer_norm(
        a, (WIDTH,), None, None, 1e-5
    )[0],
    "rms_norm": lambda a, b: F.rms_norm(a, (WIDTH,)),
    "group_norm": lambda a, b: F.group_norm(a, 2),
    "frobenius_norm.dim": lambda a, b: torch.ops.aten.frobenius_norm(a, [1]),
    "nuclear_norm": lambda a, b: torch.ops.aten.nuclear_norm(a),
    "nuclear_norm.dim": lambda a, b: torch.ops.aten.nuclear_norm(square(a), [1, 2]),
    "cosine_similarity": F.cosine_similarity,
    "dist": torch.dist,
    "pdist": lambda a, b: torch.pdist(a),
    "renorm": lambda a, b: a.renorm(2, 0, 1.0),
    "logsumexp": lambda a, b: a.logsumexp(-1),
    **{
        f"upsample_{name}": (
            lambda a, b, n=name: F.interpolate(line(a), scale_factor=2.5, mode=n[:-2])
        )
        for name in ("nearest1d", "linear1d")
    },
    "_upsample_nearest_exact1d": lambda a, b: F.interpolate(
        line(a), scale_factor=2.5, mode="nearest-exact"
    ),
    **{
        f"upsample_{name}": (
            lambda a, b, n=name: F.interpolate(image(a), scale_factor=2.5, mode=n[:-2])
        )
        for name in ("nearest2d", "bilinear2d", "bicubic2d")
    },
    "_upsample_nearest_exact2d": lambda a, b: F.interpolate(
        image(a), scale_factor=2.5, mode="nearest-exact"
    ),
    "_upsample_bilinear2d_aa": lambda a, b: F.interpolate(
        image(a), size=(3, 3), mode="bilinear", antialias=True
    ),
    "_upsample_bicubic2d_aa": lambda a, b: F.interpolate(
        image(a), size=(3, 3), mode="bicubic", antialias=True
    ),
    **{
        f"upsample_{name}": (
            lambda a, b, n=name: F.interpolate(volume(a), scale_factor=2.5, mode=n[:-2])
        )
        for name in ("nearest3d", "trilinear3d")
    },
    "_upsample_nearest_exact3d": lambda a, b: F.interpolate(
        volume(a), scale_factor=2.5, mode="nearest-exact"
    ),
    "softmax.int": lambda a, b: a.softmax(-1),
    "log_softmax.int": lambda a, b: a.log_softmax(-1),
    "cumprod": lambda a, b: (inside(a) + 0.5).cumprod(-1),
    "cumsum": lambda a, b: a.cumsum(-1),
    "linalg_vector_norm": lambda a, b: torch.linalg.vector_norm(a, dim=-1),
    "linalg_matrix_norm.str_ord": lambda a, b: torch.linalg.matrix_norm(square(a)),
    "sum": lambda a, b: a.sum(),
    "sum.dim_IntList": lambda a, b: a.sum(-1),
    "norm.Scalar": lambda a, b: torch.ops.aten.norm.Scalar(a, 2),
    "norm.ScalarOpt_dim": lambda a, b: torch.ops.aten.norm.ScalarOpt_dim(a, 2, [1]),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, inside(b)),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "atan2": torch.atan2,
    "bilinear": lambda a, b: F.bilinear(a, b, a.view(2, WIDTH, WIDTH)),
    "cross": lambda a, b: torch.cross(threes(a), threes(b), dim=1),
    "dot": lambda a, b: torch.stack([torch.dot(x, b[0]) for x in a]),
    "vdot": lambda a, b: torch.stack([torch.vdot(x, b[0]) for x in a]),
    "index_put": lambda a, b: a.index_put((classes(a),), b, accumulate=True),
    "tensordot": lambda a, b: torch.tensordot(a, b, dims=([1], [1])),
    "scatter_add": lambda a, b: torch.zeros_like(a).scatter_add(0, labels(a), a),
}

FFT = "fft fft2 fftn hfft ifft ifft2 ifftn ihfft irfft irfft2 irfftn rfft rfft2 rfftn"

OF_CPU: dict[str, Call] = {
    # -- pools, pads, losses
    "adaptive_avg_pool3d": lambda a, b: F.adaptive_avg_pool3d(volume(a), 2),
    "adaptive_max_pool3d": lambda a, b: F.adaptive_max_pool3d(volume(a), 2),
    "avg_pool3d": lambda a, b: F.avg_pool3d(volume(a), 2),
    "max_pool3d": lambda a, b: F.max_pool3d(volume(a), 2),
    "fractional_max_pool2d": lambda a, b: F.fractional_max_pool2d(
        image(a), 2, output_size=2, _random_samples=middle(a, 8, 4, 2)
    ),
    "fractional_max_pool3d": lambda a, b: F.fractional_max_pool3d(
        volume(a), 2, output_size=2, _random_samples=middle(a, 2, 4, 3)
    ),
    "max_unpool2d": lambda a, b: F.max_unpool2d(
        *F.max_pool2d(image(a), 2, return_indices=True), 2
    ),
    "max_unpool3d": lambda a, b: F.max_unpool3d(
        *F.max_pool3d(volume(a), 2, return_indices=True), 2
    ),
    "reflection_pad1d": lambda a, b: F.pad(line(a), (2, 2), mode="reflect"),
    "reflection_pad2d": lambda a, b: F.pad(image(a), (2, 2, 2, 2), mode="reflect"),
    "replication_pad1d": lambda a, b: F.pad(line(a), (2, 2), mode="replicate"),
    "replication_pad2d": lambda a, b: F.pad(image(a), (2, 2, 2, 2), mode="replicate"),
    "replication_pad3d": lambda a, b: F.pad(volume(a), (2,) * 6, mode="replicate"),
    "grid_sampler_2d": lambda a, b: torch.grid_sampler_2d(
        image(a), grid(b), 0, 0, False
    ),
    "grid_sampler_3d": lambda a, b: F.grid_sample(
        volume(a),
        b.tanh().view(2, 4, 4, 16)[..., :3].unsqueeze(1),
        align_corners=False,
    ),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(
        inside(a), b.sigmoid(), reduction="none"
    ),
    "cross_entropy_loss": lambda a, b: F.cross_entropy(a, classes(a), reduction="none"),
    "multilabel_margin_loss_forward": (
        lambda a, b: torch.ops.aten.multilabel_margin_loss_forward(a, labels(a), 0)[0]
    ),
    "fake_quantize_per_tensor_affine": (
        lambda a, b: torch.fake_quantize_per_tensor_affine(a, 0.01, 0, -128, 127)
    ),
    "nanquantile": lambda a, b: torch.nanquantile(a, middle(a), dim=-1),
    "nanquantile.scalar": lambda a, b: torch.nanquantile(a, 0.3, dim=-1),
    "quantile": lambda a, b: torch.quantile(a, middle(a), dim=-1),
    "quantile.scalar": lambda a, b: torch.quantile(a, 0.3, dim=-1),
    "trace": lambda a, b: a.trace(),
    # -- linear algebra
    "_lu_with_info": lambda a, b: torch._lu_with_info(square(a))[0],
    "cholesky": lambda a, b: torch.cholesky(positive(a)),
    "cholesky_inverse": lambda a, b: torch.cholesky_inverse(square(a).tril()),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(pair(b), square(a).tril()),
    # Torch has no gradient of it.
    "geqrf": lambda a, b: pair(a) + torch.geqrf(square(a).detach())[0],
    "inverse": lambda a, b: torch.inverse(square(a)),
    "linalg_cholesky": lambda a, b: torch.linalg.cholesky(positive(a)),
    "linalg_cholesky_ex": lambda a, b: torch.linalg.cholesky_ex(positive(a))[0],
    "linalg_cond": lambda a, b: torch.linalg.cond(square(a)),
    # The order in which eigenvalues are found depends on the precision.
    "linalg_eig": lambda a, b: torch.linalg.eig(positive(a))[0].real.sort()[0],
    "linalg_eigh": lambda a, b: torch.linalg.eigh(positive(a))[0],
    "linalg_eigvals": lambda a, b: torch.linalg.eigvals(positive(a)).real.sort()[0],
    "linalg_eigvalsh": lambda a, b: torch.linalg.eigvalsh(positive(a)),
    "linalg_householder_product": lambda a, b: torch.linalg.householder_product(
        pair(a), reflections(b)
    ),
    "linalg_inv": lambda a, b: torch.linalg.inv(square(a)),
    "linalg_inv_ex": lambda a, b: torch.linalg.inv_ex(square(a))[0],
    "linalg_qr": lambda a, b: torch.linalg.qr(square(a))[1],
    "linalg_solve": lambda a, b: torch.linalg.solve(square(a), pair(b)),
    "linalg_svd": lambda a, b: torch.linalg.svd(square(a))[1],
    "linalg_svdvals": lambda a, b: torch.linalg.svdvals(square(a)),
    "linalg_tensorinv": lambda a, b: torch.linalg.tensorinv(
        square(a)[0].view(4, 4, WIDTH)
    ),
    "linalg_tensorsolve": lambda a, b: torch.linalg.tensorsolve(
        square(a)[0].view(4, 4, WIDTH), b[0].view(4, 4)
    ),
    "lu_solve": lambda a, b: torch.lu_solve(
        pair(b), square(a), torch.arange(1, 1 + WIDTH).int().repeat(2, 1)
    ),
    "orgqr": lambda a, b: torch.orgqr(pair(a), reflections(b)),
    "ormqr": lambda a, b: torch.ormqr(pair(a), reflections(b), pair(b)),
    "pinverse": lambda a, b: torch.pinverse(square(a)),
    "qr": lambda a, b: torch.qr(square(a))[1],
    "svd": lambda a, b: torch.svd(square(a))[1],
    "triangular_solve": lambda a, b: torch.triangular_solve(pair(b), square(a))[0],
    # -- Fourier transforms, complex numbers
    **{
        f"fft_{name}": (lambda a, b, n=name: getattr(torch.fft, n)(pair(a)).abs())
        for name in FFT.split()
    },
    "stft": lambda a, b: torch.stft(
        a, 8, window=torch.ones(8), center=False, return_complex=True
    ).abs(),
    "stft.center": lambda a, b: torch.ops.aten.stft.center(
        a, 8, window=torch.ones(8), return_complex=True
    ).abs(),
    "polar": lambda a, b: torch.polar(a.abs(), b).real,
    "view_as_complex": lambda a, b: torch.view_as_complex(a.view(ROWS, -1, 2)).abs(),
    # -- the widest dtype
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "index_copy": lambda a, b: a.index_copy(0, classes(a)[:WIDTH], b[:WIDTH]),
}

BLOCKS: dict[str, dict[str, Call]] = {
    "cuda": {**OF_BOTH, **OF_CUDA},
    "cpu": {**OF_BOTH, **OF_CPU},
}

WITHOUT_SAMPLE: dict[str, dict[str, str]] = {
    "cuda": {
        "binary_cross_entropy": "autocast refuses it",
        "linalg_matrix_norm": "no CPU has a low kernel of it, nor does autocast cast",
    },
    "cpu": {
        "_grid_sampler_2d_cpu_fallback": "it cannot be captured, without fake kernel",
        "ctc_loss.IntList": "it cannot be captured, as its shapes depend on data",
        "ctc_loss.Tensor": "it cannot be captured, as its shapes depend on data",
        "linalg_cond.p_str": "torch itself fails in its backward",
        "linalg_lstsq": "it cannot be captured, as its shapes depend on data",
        **dict.fromkeys(
            (
                "linalg_matrix_rank",
                "linalg_matrix_rank.atol_rtol_float",
                "linalg_matrix_rank.atol_rtol_tensor",
                "linalg_matrix_rank.tol_tensor",
            ),
            "it gives whole numbers, which a rounding leaves alone or changes by 1",
        ),
    },
}
"""Listed ops that have no sample here, each with the reason."""
