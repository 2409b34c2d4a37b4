"""A card without kernels: what CUDA's libraries do, but for computing, on a machine without a GPU.

``python -m tests.fake_card SITE -- COMMAND`` runs a command with libraries in place of
NVIDIA's. Memory is real, as an emulated device's is: pages of a memfd that are mapped, unmapped,
copied and counted, with CUDA's errors for wrong calls. Streams work at once; captures of graphs
forbid what they forbid on a card. Kernels do nothing, so tokens are made up (``path``). It is for
trying the code around kernels. Nothing measured on it means anything.
"""

NAME = "fake card without kernels"
