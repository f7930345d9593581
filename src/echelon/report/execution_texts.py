"""What the page of execution says, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

EXECUTION_TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "execution_title": ("Execution report", "订单执行报告"),
        "execution_span": (
            "{split}: {orders} orders on {dates} days, {first} to {last}",
            "{split}：{orders} 笔母单，{dates} 个交易日，{first} 至 {last}",
        ),
        "execution_caution": (
            "All policies worked the same orders. Gains are basis points of the arrival price; "
            "orders of one day share its prices, so that intervals (95 %, Student's) are over "
            "days. Of PA, which papers report, the mean is above zero for haste even where "
            "nothing can be gained: claims are made of gains, not of PA.",
            "所有策略执行同一批母单。收益以到达价的基点计；同一日的母单共享行情，"
            "因此区间（95 %，t 分布）按交易日计算。论文常用的 PA 即使在无利可图的行情中也会偏向"
            "抢先成交，故结论只以收益（而非 PA）为准。",
        ),
        "execution_intervals": (
            "Intervals are over dates and hold the seeds fixed: they say how the policies as they "
            "were trained would fare on other days, not how another training would end. The seeds, "
            "where there are several, are told one by one.",
            "区间按交易日计算，种子固定不变：它说明已训练好的策略在其他交易日的表现，"
            "而不是重新训练的结果。若有多个种子，则逐一列出。",
        ),
        "execution_rest": (
            "Of an order that was not filled wholly, the rest is charged at the last price plus "
            "what trading a tick to its cap would cost: leaving it is not free.",
            "未全部成交的母单，剩余部分按最后价格加上“将一个 tick 成交至其上限”所需的成本计价："
            "留下不做并非没有代价。",
        ),
        "execution_measures": ("Measures", "指标"),
        "execution_policy": ("Policy", "策略"),
        "execution_gain_twap": ("Gain over TWAP, bp", "相对 TWAP 收益，bp"),
        "execution_gain_vwap": ("over VWAP, bp", "相对 VWAP，bp"),
        "execution_gain_arrival": ("over arrival, bp", "相对到达价，bp"),
        "execution_shortfall": ("Shortfall, bp", "执行落差，bp"),
        "execution_pa": ("PA, bp", "PA，bp"),
        "execution_glr": ("GLR", "GLR"),
        "execution_ffr": ("Filled", "成交比例"),
        "execution_less": ("Paired differences", "配对差异"),
        "execution_less_note": (
            "Gain over TWAP less that of each schedule, order by order.",
            "逐单与各基准调度之差（相对 TWAP 收益）。",
        ),
        "execution_seeds": ("Seeds", "种子"),
        "execution_paths": ("How the orders were worked", "执行轨迹"),
        "execution_paths_note": (
            "Share of the order executed by the time of day, mean over orders; dotted: share of "
            "the day's volume.",
            "截至各时刻已执行的母单比例（各单平均）；虚线为当日成交量的累计比例。",
        ),
        "execution_volume": ("Market volume", "市场成交量"),
        "execution_spread": ("Distribution of PA", "PA 分布"),
        "execution_spread_note": (
            "Share of orders by price advantage against the TWAP of their own ticks; the outermost "
            "bins hold all beyond them.",
            "按相对自身时段 TWAP 的价格优势统计的母单占比；最外两格含其外全部。",
        ),
        "execution_hours": ("By hour", "分时段"),
        "execution_hours_note": (
            "What was executed in each hour: its share of the order, and its gain over TWAP in bp.",
            "各小时成交占母单的比例，及其相对 TWAP 的收益（bp）。",
        ),
        "execution_hour": ("Hour", "小时"),
        "execution_share": ("share of order", "母单占比"),
        "execution_gain": ("gain, bp", "收益，bp"),
        "execution_line": (
            "half spread {spread} bp, impact {temporary} bp temporary and {permanent} bp permanent "
            "at a bar's whole volume (linear), at most {share} % of a bar's volume, a decision "
            "every {bars} bars; fills at {price}; no commission, stamp duty, lots, T+1 or price "
            "limits: parent orders are given",
            "半价差 {spread} bp，冲击（占整根成交量时，线性）临时 {temporary} bp、"
            "永久 {permanent} bp，单根成交量参与上限 {share} %，每 {bars} 根 K 线决策一次；"
            "成交于{price}；不计佣金与印花税，无整手、T+1 与涨跌停限制：母单已给定",
        ),
        "execution_at_close": ("the bar's close", "K 线收盘价"),
        "execution_at_vwap": ("the bar's VWAP", "K 线成交均价"),
        "execution_at_book": ("the best opposite quote", "最优对手价"),
        "execution_facts": ("How it was made", "生成方式"),
        "execution_rules": ("Rules", "规则"),
        "execution_symbols": ("Symbols", "标的"),
        "execution_day": ("{name}, {side} {amount} shares", "{name}，{side} {amount} 股"),
        "execution_day_note": (
            "The order of which the last policy's gain is the median among the longest ones, "
            "worked by each policy (of a learned one, by its first seed). Above: the market's "
            "price, its TWAP, and the fills, with areas by their size. Below: share of the order "
            "executed; in brackets the gain over TWAP. A click on a name hides it.",
            "最长母单中最后一个策略收益居中的一笔，由各策略分别执行（学习策略取第一个种子）。"
            "上：市场价格、TWAP 与各笔成交（面积表示数量）；"
            "下：已执行比例，括号内为相对 TWAP 的收益。点击名称可隐藏。",
        ),
        "execution_market_price": ("Price", "价格"),
        "execution_buy": ("buy", "买入"),
        "execution_sell": ("sell", "卖出"),
        "execution_of_order": ("Share of the order", "母单占比"),
        "execution_bp": ("basis points", "基点"),
        "worked": ("How orders were executed", "日内执行"),
        "worked_note": (
            "Costs in basis points of the orders' value at arrival; a gain is negative. Spread, "
            "impact, timing (what the market did between arrival and the fill) and fees add up to "
            "the shortfall. Against TWAP and VWAP of the day: without fees. ",
            "成本以到达价计的订单金额的基点表示，负数为收益。价差、冲击、择时（到达至成交期间的市场变动）"
            "与费用之和即执行落差。相对当日 TWAP 与 VWAP 的部分不含费用。",
        ),
        "worked_at_once": (
            "Filled at once, for want of the day's bars: {share} of the fills.",
            "因缺少日内行情而即时成交的占 {share}。",
        ),
        "worked_immediate": (
            "Filled at once, at the open; the day's bars, hence TWAP and VWAP, are known for "
            "{share} of the fills.",
            "按开盘价即时成交；其中 {share} 的成交有日内行情，可与 TWAP 和 VWAP 比较。",
        ),
        "worked_book": ("Book", "账户"),
        "worked_spread": ("Spread", "价差"),
        "worked_impact": ("Impact", "冲击"),
        "worked_timing": ("Timing", "择时"),
        "worked_fees": ("Fees", "费用"),
        "worked_total": ("Shortfall", "执行落差"),
        "worked_against_twap": ("Against TWAP", "相对 TWAP"),
        "worked_against_vwap": ("Against VWAP", "相对 VWAP"),
    }
)
