"""`isotype chat`: talk to a model or an adapter."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.core.arguments import Parser
from isotype.core.formats import ASKED


def chat_parser() -> Parser:
    """The arguments of `isotype chat`."""
    parser = Parser(prog="isotype chat", description="Talk to a model or an adapter.")
    parser.add_argument("model", help="directory of a model or an adapter, a hub id, or embedded:smollm2")
    parser.add_argument("--ask", action="append", default=None, metavar="QUESTION", help="ask this and leave")
    parser.add_argument(
        "--image", action="append", default=None, metavar="FILE",
        help="a picture that the first question is about, of a model that takes them; give it again for several",
    )  # fmt: skip
    parser.add_argument(
        "--system", default=None, metavar="TEXT", help="a system message before the conversation"
    )
    parser.add_argument("--dtype", default="auto", help="compute dtype")
    parser.add_argument("--quantization", choices=ASKED, default=None)
    parser.add_argument("--device", default="auto", help="device to run on")
    parser.add_argument(
        "--model_revision", default=None, help="branch, tag or commit of a hub id; of an adapter, of its base"
    )
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype chat` and return its exit status."""
    options = chat_parser().parse_args(argv)
    quiet_libraries()
    from isotype.train.chat import chat

    return chat(options, console)
