"""What a report says of a hierarchy, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

HIERARCHY_TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # Who was in charge.
        "command": ("Who was in charge", "由谁主导"),
        "command_note": (
            "Growth of 1 of the real book, after costs, and in thin lines of the book that every "
            "expert trades by itself. The band below shows whose orders were sent. Marks are what "
            "risk control did; cuts of orders are frequent and hidden until their name is clicked.",
            "实际组合的净值（已扣成本，初始为 1）；细线为各专家独立账户的净值。"
            "下方色带表示执行的是哪位专家的指令。标记为风险控制的动作；订单削减较频繁，默认隐藏，点击图例可显示。",
        ),
        "expert_n": ("Expert {n}", "专家 {n}"),
        "who_portfolio": ("Portfolio", "组合"),
        "who_router": ("Router", "路由器"),
        "real_book": ("Real book", "实际组合"),
        "own_book": ("{name}, own book", "{name}（独立账户）"),
        "in_charge": ("In charge", "主导专家"),
        "mark_halted": ("All to cash", "全部清仓"),
        "mark_masked": ("Expert masked", "专家被屏蔽"),
        "mark_halved": ("Limit halved", "仓位上限减半"),
        "mark_freed": ("Released", "解除限制"),
        "mark_cut": ("Orders cut", "订单被削减"),
        "mark_failed": ("Alert failed", "告警失败"),
        "usage": ("Usage of the experts", "专家使用情况"),
        "usage_note": (
            "Share of the bars of a {period}; below, how evenly the router chose: 0 means always "
            "the same, 1 all alike, cash included. Over the whole run it is {entropy}.",
            "每{period}内各专家主导的 K 线占比；下方为路由器选择的均匀程度：0 表示始终选同一个，"
            "1 表示均匀（含现金）。整个区间为 {entropy}。",
        ),
        "usage_share": ("Share of bars", "K 线占比"),
        "usage_entropy": ("Usage entropy", "使用熵"),
        "entropy_short": ("Entropy", "使用熵"),
        "entropy_axis": ("Entropy, {n} decisions", "熵（{n} 次决策）"),
        "distance": ("How different their portfolios are", "专家组合的差异"),
        "distance_note": (
            "Mean action pairwise distance (MAPD): half the sum of the differences of target "
            "weights, cash included, mean over pairs. 0 is the same portfolio, 1 a disjoint one. "
            "Mean of the run {mean}; below the threshold on {below} of the bars.",
            "平均动作两两距离（MAPD）：目标权重（含现金）之差绝对值总和的一半，对所有专家对取平均。"
            "0 表示组合相同，1 表示毫无重合。区间均值 {mean}；{below} 的 K 线低于阈值。",
        ),
        "mapd_axis": ("MAPD", "MAPD"),
        "each_bar": ("Each bar", "逐根 K 线"),
        "trailing": ("Mean of {n} bars", "{n} 根均值"),
        "threshold": ("Threshold {value}", "阈值 {value}"),
        "correlations": ("Correlation of their returns", "专家收益的相关性"),
        "correlations_note": (
            "Of the returns of the experts' own books, bar by bar.",
            "各专家独立账户逐根 K 线收益率的相关系数。",
        ),
        "portfolio_map": ("Map of their portfolios", "组合分布图"),
        "portfolio_map_note": (
            "Mean target weights, cash included, in the plane in which they differ most "
            "(principal components): near means alike.",
            "平均目标权重（含现金）投影到差异最大的平面（主成分）：越近越相似。",
        ),
        "no_map": (
            "The experts cannot be told apart, or a portfolio is not known.",
            "专家之间没有差异，或某个组合未知。",
        ),
        "component": ("Component {n} ({share} of the variance)", "主成分 {n}（方差占比 {share}）"),
        # Over the same experts.
        "companions": ("Over the same experts", "相同专家之上的对照"),
        "companions_note": (
            "Is the router worth having? The fixed-share hedge puts the expert in charge whose own "
            "book it trusts most, by a rule without training, under the same risk control and "
            "costs. Experts alone trade their own book, with no router and no risk control. The "
            "best of them is chosen IN HINDSIGHT, on this very window: nobody could have traded "
            "it. No verdict rests on these rows.",
            "路由器是否物有所值？固定份额对冲按无需训练的规则，让其最信任的专家主导，"
            "风险控制与成本相同。单独的专家各自交易，没有路由器与风险控制。"
            "最优专家是在本区间上事后挑选的：当时无人能据此交易。结论不依据这些行。",
        ),
        "companions_note_seeds": (
            "Every seed has experts of its own; mean ± standard deviation over the seeds.",
            "每个种子各有自己的专家；数值为种子间均值 ± 标准差。",
        ),
        "companions_by_seed": (
            "Sharpe ratio of every expert, by seed",
            "各专家的夏普比率（按种子）",
        ),
        "companions_differences": (
            "Sharpe ratio less theirs (a year)",
            "与其夏普比率之差（年化）",
        ),
        "companions_differences_note": (
            "Of the mean over the seeds, on the same days (block bootstrap). An interval across 0 "
            "leaves it open who is ahead.",
            "种子均值之差，按相同日期计算（块自助法）。区间跨过 0 即无法判断优劣。",
        ),
        "companions_folds_note": (
            "Fold by fold, and stitched. The fixed-share hedge is a rule without training over the "
            "experts of each fold, under the same risk control and costs; the mean expert trades "
            "alone, without risk control. A best expert is not shown: over several folds it would "
            "be chosen in hindsight. No verdict rests on these columns.",
            "逐折结果与拼接序列。固定份额对冲是对每折专家应用的无需训练的规则，风险控制与成本相同；"
            "单独专家的均值不含风险控制。不显示最优专家：跨折的最优只能事后挑选。结论不依据这些列。",
        ),
        "row_hedge": ("Fixed-share hedge", "固定份额对冲"),
        "row_best": ("Best expert alone, in hindsight", "最优单个专家（事后）"),
        "row_experts": ("Experts alone, mean", "单独专家均值"),
        # Beside other runs.
        "beside": ("Beside other runs", "与其他实验对比"),
        "beside_note": (
            "The same window, costs and baselines. The last columns: the annual Sharpe ratio less "
            "that of {first}, with what other days like these would change (block bootstrap) and "
            "what other seeds would (Welch's t; from two seeds each on). An interval across 0 "
            "leaves it open who is ahead.",
            "相同的区间、成本与基准。最后几列：年化夏普比率减去 {first} 的差值；"
            "两个区间分别反映类似的其他日期（块自助法）与其他随机种子（Welch t 检验，"
            "双方各需至少两个种子）带来的变化。区间跨过 0 即无法判断优劣。",
        ),
        "beside_stale": (
            "This run was trained anew since it was compared: compare it again.",
            "该实验在对比之后重新训练过：请重新对比。",
        ),
        "beside_run": ("Run", "实验"),
        "beside_of": (" · {algo}, {seeds}", " · {algo}，{seeds}"),
        "beside_seed": ("one seed", "1 个种子"),
        "beside_n_seeds": ("{n} seeds", "{n} 个种子"),
        "beside_less": ("Sharpe less {first}", "夏普比率减 {first}"),
        "beside_days": ("over days, 95 %", "按日期 95 %"),
        "beside_seeds": ("over seeds, 95 %", "按种子 95 %"),
        # Attribution.
        "attribution": ("Where the result came from", "收益来源"),
        "attribution_note": (
            "In log returns, which add up exactly; to turn one into a gain or loss, take "
            "exp(x) − 1. Market: {market}, before costs. Expert skill: the mean of the experts' "
            "own books, before costs, less the market. Routing: the own books of those in charge, "
            "less that mean. Holdings: the real book before costs, less the own books of those in "
            "charge; it holds other things after a switch or a cut. Costs: what the real book "
            "paid. Intervals say how a part would vary on other days like these, for the same "
            "experts and router (block bootstrap); one across 0 leaves the part's sign open.",
            "以对数收益率计，各部分严格相加；x 对应的实际收益为 exp(x) − 1。"
            "市场：{market}（成本前）。专家能力：各专家独立账户（成本前）均值减市场。路由：主导专家独立账户减上述均值。"
            "持仓差异：实际组合（成本前）减主导专家独立账户，源于切换过程与仓位削减。"
            "成本：实际组合支付的费用。区间表示同一批专家与路由器在类似的其他日期上的波动"
            "（块自助法）；区间跨过 0 即无法判断正负。",
        ),
        "attribution_none": (
            "A book lost everything: it has no log return, so nothing can be shared out.",
            "有账户损失殆尽，对数收益率不存在，无法归因。",
        ),
        "market_cash": ("cash, as no baseline was run", "现金（未运行基准策略）"),
        "part": ("Part", "来源"),
        "part_market": ("Market", "市场"),
        "part_skill": ("Expert skill", "专家能力"),
        "part_routing": ("Routing", "路由"),
        "part_holding": ("Holdings", "持仓差异"),
        "part_costs": ("Costs", "成本"),
        "part_commission": ("– commission", "– 佣金"),
        "part_stamp": ("– stamp duty", "– 印花税"),
        "part_slippage": ("– slippage", "– 滑点"),
        "part_total": ("Real book", "实际组合"),
        "over_run": ("Log return", "对数收益率"),
        "a_year": ("a year", "每年"),
        "log_return_axis": ("Log return over the run, %", "区间对数收益率（%）"),
        "by_seed_parts": ("Of every seed", "各个种子"),
        "accounts": ("By expert", "按专家"),
        "accounts_note": (
            "While in charge: what the real book gained after costs at those bars. Right choices: "
            "decisions after which the own book of the one chosen beat the experts' mean over the "
            "next {horizon} bars.",
            "主导期间：实际组合在这些 K 线上的净收益。正确率：决策后 {horizon} 根 K 线内，"
            "所选专家独立账户跑赢专家均值的比例。",
        ),
        "expert": ("Expert", "专家"),
        "time_in_charge": ("Time in charge", "主导时间"),
        "decisions_for": ("Decisions", "决策次数"),
        "while_in_charge": ("While in charge", "主导期间收益"),
        "own_return": ("Own book", "独立账户收益"),
        "own_gross": ("before costs", "成本前"),
        "right_choices": ("Right choices", "正确率"),
        "router_hits": (
            "The router was right in {rate} of {n} decisions, 95 % interval {low} to {high}; a "
            "choice by lot would have been right in {chance}.",
            "路由器在 {n} 次决策中的正确率为 {rate}，95 % 区间 {low} 至 {high}；"
            "随机选择的正确率为 {chance}。",
        ),
        "router_hits_bare": (
            "The router was right in {rate} of {n} decisions, too few for an interval; a choice by "
            "lot would have been right in {chance}.",
            "路由器在 {n} 次决策中的正确率为 {rate}（次数太少，无区间）；"
            "随机选择的正确率为 {chance}。",
        ),
        "router_hits_none": (
            "No decision lies far enough before the end to be judged.",
            "没有可供评判的决策。",
        ),
        # Risk events.
        "risk_events": ("Risk events", "风险事件"),
        "risk_events_note": ("Newest first.", "最新的在前。"),
        "risk_events_cut": (
            "Newest first: the last {shown} of {n}; all are in {file}.",
            "最新的在前：显示全部 {n} 条中的最近 {shown} 条，完整记录见 {file}。",
        ),
        "risk_events_none": ("Risk control had nothing to do.", "风险控制未触发。"),
        "time": ("Time", "时间"),
        "what": ("What", "事件"),
        "who": ("Who", "对象"),
        "measured": ("Measured", "测得值"),
        "limit": ("Limit", "限值"),
        "done": ("Done", "处理"),
        "risk_masked": ("Masked", "屏蔽"),
        "risk_released": ("Released", "解除屏蔽"),
        "risk_forced": ("Forced decision", "强制重新决策"),
        "risk_halved": ("Limit halved", "上限减半"),
        "risk_restored": ("Limit restored", "恢复上限"),
        "risk_halted": ("Halted", "清仓停止"),
        "risk_resumed": ("Resumed", "恢复交易"),
        "risk_turnover_cut": ("Turnover cut", "换手削减"),
        "risk_alert_failed": ("Alert failed", "告警失败"),
        # The router in training.
        "router_gain": ("Router: return less the experts' mean", "路由器：相对专家均值的收益"),
        "router_entropy": ("Router: entropy of its choices", "路由器：选择的熵"),
        "router_lambda": ("Router: weight λ of the KL bonus", "路由器：KL 奖励权重 λ"),
        # The population in training.
        "population": ("The population in training", "训练中的专家种群"),
        "population_note": (
            "Diversity, usage and fitness after each round, on shared probe states and validation "
            "windows; entropy as a share of log K. Dashed: the least diversity, and the least "
            "entropy that the router's bonus keeps.",
            "每轮之后的多样性、使用熵与适应度（基于共享探测状态与验证区间）；熵为 log K 的占比。"
            "虚线为多样性阈值与路由奖励所维持的最低熵。",
        ),
        "volume": ("Population volume", "种群体积"),
        "usage_entropy_rounds": ("Usage entropy, share of log K", "使用熵（log K 的占比）"),
        "entropy_floor": ("Floor {value}", "下限 {value}"),
        "fitness": ("Fitness", "适应度"),
        "round": ("Round", "轮次"),
        "skill_map": ("Map of their skills", "技能分布图"),
        "skill_map_note": (
            "Skill vectors at the end, in a plane of their principal components. They are made "
            "orthogonal, so that all stand equally far apart: what the experts made of them is in "
            "the map of their portfolios.",
            "训练结束时的技能向量，投影到其主成分平面。技能向量彼此正交，两两距离相等；专家据此形成的差异见组合分布图。",
        ),
        "lineage": ("Lineage", "谱系"),
        "lineage_note": (
            "A line a member, coloured by expert. A mark is a decision of evolution; slanted lines "
            "lead to it from the member whose weights or hyperparameters were taken.",
            "每条横线为一个成员，颜色表示所属专家。标记为进化决策；斜线来自被复制权重或超参数的成员。",
        ),
        "copy_weights": ("Weights copied", "复制权重"),
        "copy_hyper": ("Hyperparameters taken", "借用超参数"),
        "life_founder": ("Founder", "初始"),
        "life_exploit": ("Copy of the best", "复制最优"),
        "life_migrate": ("Migrant", "迁入"),
        "life_borrow": ("Borrowed settings", "借用设置"),
        "life_propose": ("Change tried", "尝试改动"),
        "life_keep": ("Change kept", "保留改动"),
        "life_revert": ("Change undone", "撤销改动"),
        "life_reseed": ("Begun anew", "重新播种"),
        "population_events": ("What befell it", "种群事件"),
    }
)
