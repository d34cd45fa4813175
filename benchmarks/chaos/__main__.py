from benchmarks.chaos import app

app()
