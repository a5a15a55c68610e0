"""`python -m sima_attn.cli`."""

from sima_attn.cli import main

main()
