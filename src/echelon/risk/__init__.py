"""Risk control: who may trade, how much, and what is written down about it.

    drawdown.py    experts that fell too far are masked for the router
    cvar.py        tail loss: a limit on positions while trading, a cost while training
    lagrange.py    the price of that cost (PID-Lagrangian)
    portfolio.py   halt, turnover limit and position limit of what is really held
    budget.py      drawdown budget and target volatility of every real book
    events.py      the log of all that, and alerts

Everything here gets what happened, bar by bar, for many books at once, and answers with what
holds for the next decision. Nothing here reads a market.
"""
