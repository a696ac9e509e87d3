"""The grouped matrix product in XLA as formulated for GPUs: the contract, and the size of its tiles."""

from pallas_kernels.grouped_matmul import xla_gpu
from tests.pallas_kernels.matmul_cases import GroupedMatmulContract


class TestGroupedMatmulXlaGpu(GroupedMatmulContract):
    op = staticmethod(xla_gpu.grouped_matmul)

    def test_tiles_hold_the_rows_of_most_experts(self) -> None:
        assert [xla_gpu.tile_rows(T, 8) for T in (1, 64, 65, 512, 4096)] == [16, 16, 32, 128, 256]
