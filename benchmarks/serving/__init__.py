"""Measure serving: the cost of a step by delivery, compile speed by optimisation, act speed by mode and cache, the
compiler service under load, what the proxy adds, and the proxy under too many requests.

memcompiler bench serving delivery --compiler DIR --executor DIR --lengths out/eval
memcompiler bench serving compile --model MODEL
memcompiler bench serving act --model MODEL
memcompiler bench serving load --clients 1,8,64
memcompiler bench serving proxy
memcompiler bench serving overload
"""

import typer

from benchmarks.serving.act_speed import measure_act_speed
from benchmarks.serving.compile_speed import measure_compile_speed
from benchmarks.serving.delivery import measure_delivery
from benchmarks.serving.load import measure_load
from benchmarks.serving.overload import measure_overload
from benchmarks.serving.proxy import measure_proxy

app = typer.Typer(no_args_is_help=True, help="Measure serving.")
app.command("delivery")(measure_delivery)
app.command("compile")(measure_compile_speed)
app.command("act")(measure_act_speed)
app.command("load")(measure_load)
app.command("proxy")(measure_proxy)
app.command("overload")(measure_overload)
