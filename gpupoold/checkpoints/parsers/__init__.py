"""Search for a model's tool parser, reasoning parser and chat template in its small files.

``rules`` has the table of markup and parsers of vLLM and decides, ``search`` reads the files. The
package imports neither torch nor vLLM; the daemon uses the package as well as workers and frontends,
so that all agree.
"""

from gpupoold.checkpoints.parsers.rules import ChatFormat as ChatFormat
from gpupoold.checkpoints.parsers.rules import Finding as Finding
from gpupoold.checkpoints.parsers.search import FoundParsers as FoundParsers
from gpupoold.checkpoints.parsers.search import found_parsers as found_parsers
