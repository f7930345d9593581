"""The charts of a report: each is said once and drawn on pages and on slides.

chart.py          what a chart is: plots of lines, points, bars, spans and cells; the palette
interactive.py    draws one on a page, through plotly.js
slides.py         draws one as a PNG, through matplotlib
books.py, hierarchy.py    the charts of a run
variants.py       pictures of an ablation and of a comparison, a row a variant
"""
