"""Every word a report says, in English and Chinese.

`Words("zh")("equity")` gives the Chinese text; texts with fields take them by name. A measure, a
baseline or a reason that has no translation is shown by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from echelon.errors import UsageError
from echelon.ops.measures import LABELS
from echelon.report.execution_texts import EXECUTION_TEXTS
from echelon.report.hierarchy_texts import HIERARCHY_TEXTS
from echelon.report.trust_texts import TRUST_TEXTS
from echelon.report.walkforward_texts import WALK_FORWARD_TEXTS

Lang = Literal["en", "zh"]


class Words:
    """The texts of one language."""

    def __init__(self, lang: str) -> None:
        if lang not in get_args(Lang):
            raise UsageError(f"no report in language {lang!r}: choose en or zh.")
        self.lang = lang
        self._column = get_args(Lang).index(lang)

    def __call__(self, key: str, **fields: object) -> str:
        """The text of `key`, its fields filled in."""
        return TEXTS[key][self._column].format(**fields)

    def measure(self, name: str) -> str:
        """What a measure is called; without a translation, as in English."""
        return self._said(name)[0]

    def meaning(self, name: str) -> str:
        """What a measure means, in a sentence; without a translation, in English."""
        return self._said(name)[1]

    def _said(self, name: str) -> Pair:
        """(name, meaning) of a measure; of one that nobody has named, its own name twice."""
        if self.lang == "zh" and name in MEASURES_ZH:
            return MEASURES_ZH[name]
        label = LABELS.get(name)
        plain = name.replace("_", " ")
        return (plain, plain) if label is None else (label.text, label.meaning)

    def name(self, key: str) -> str:
        """What a baseline, or an agent (`seed-42`), is called."""
        if key.startswith("seed-"):
            return self("seed_n", seed=key.removeprefix("seed-"))
        return NAMES[key][self._column] if key in NAMES else key.replace("_", " ")

    def in_text(self, key: str) -> str:
        """What a baseline is called in the middle of a sentence."""
        return IN_TEXT.get(key, self.name(key)) if self.lang == "en" else self.name(key)

    def reason(self, key: str) -> str:
        """Why an order was cut."""
        return REASONS[key][self._column] if key in REASONS else key.replace("_", " ")

    def ledger(self, phrase: str) -> str:
        """A phrase of a world's ledger."""
        return LEDGER[phrase][self._column] if phrase in LEDGER else phrase


Pair = tuple[str, str]

_RUN_TEXTS: Mapping[str, Pair] = MappingProxyType(
    {
        "title": ("Run report", "回测报告"),
        "no_script": (
            "The charts need JavaScript; texts and tables do not.",
            "图表需要启用 JavaScript；文字与表格不需要。",
        ),
        "split_test": ("Test", "测试集"),
        "split_valid": ("Validation", "验证集"),
        "split_train": ("Training", "训练集"),
        "span": ("{first} to {last}, {bars} bars", "{first} 至 {last}，{bars} 根 K 线"),
        "agent": ("Agent", "智能体"),
        "agent_mean": ("Agent, mean of {n} seeds", "智能体（{n} 个种子均值）"),
        "agent_one": ("Agent, seed {seed}", "智能体（种子 {seed}）"),
        "seeds": ("Single seeds", "各个种子"),
        "seed": ("Seed", "种子"),
        "seed_n": ("Seed {seed}", "种子 {seed}"),
        "median_seed": ("{name} (median Sharpe)", "{name}（夏普居中）"),
        "mean_of_seeds": ("Mean over seeds", "种子均值"),
        "show": ("Show", "显示"),
        "best_baseline": ("{name} (best baseline)", "{name}（最佳基准策略）"),
        "best_short": ("{name} (best)", "{name}（最佳）"),
        "stale": (
            "The run was changed after it was evaluated on this split. "
            "Evaluate it again: {command}",
            "该运行在此数据段评估之后又被改动过。请重新评估：{command}",
        ),
        # The lead: what came out, and no more than that.
        "over_seeds": ("over {n} seeds", "（{n} 个种子）"),
        "one_seed": ("with one seed", "（1 个种子）"),
        "lead_agent": ("{measure} {value} {seeds}", "{measure} {value}{seeds}"),
        "lead_other": ("{name} {value}", "{name} {value}"),
        "lead_above": ("above {names}", "高于{names}"),
        "lead_below": ("below {names}", "低于{names}"),
        "lead_level": (
            "no further from {names} than one standard deviation of the seeds",
            "与{names}之差在种子间一个标准差之内",
        ),
        "lead_alone": ("no baseline was run", "没有运行基准策略"),
        "and": (" and ", "与"),
        "join": ("; ", "；"),
        "comma": (", ", "，"),
        "colon": (": ", "："),
        "stop": (".", "。"),
        "caution_test": (
            "One span of history. ± is the standard deviation over seeds: it says how much "
            "training depends on chance, not how sure the result is.",
            "仅为一段历史区间。± 为种子间标准差：反映训练的随机性，并非结果的置信区间。",
        ),
        "caution_valid": (
            "This span chose the checkpoints, so its numbers flatter the agent. ± is the standard "
            "deviation over seeds.",
            "检查点即由该区间选出，因此其结果对智能体偏乐观。± 为种子间标准差。",
        ),
        "caution_train": (
            "The agent learned on this span: its numbers say nothing about other times. ± is the "
            "standard deviation over seeds.",
            "智能体在该区间上训练：其结果不能说明其他时期的表现。± 为种子间标准差。",
        ),
        "reads_once": ("This split was evaluated once.", "该数据段共评估 1 次。"),
        "reads_many": (
            "This split was evaluated {n} times; each further look makes a good result by chance "
            "more likely.",
            "该数据段已评估 {n} 次；每多看一次，偶然得到好结果的可能性就更大。",
        ),
        # Charts.
        "equity": ("Equity and drawdown", "净值与回撤"),
        "equity_note": (
            "Growth of 1, after costs. The bold line is the mean of the seeds; below it, the mean "
            "of their drawdowns. Click a name to show or hide it.",
            "初始 1 元的净值（已扣成本）。粗线为种子均值；下方为各种子回撤的均值。"
            "点击图例可显示或隐藏。",
        ),
        "equity_note_one": (
            "Growth of 1, after costs. Click a name to show or hide it.",
            "初始 1 元的净值（已扣成本）。点击图例可显示或隐藏。",
        ),
        "thinned": (
            "Shown: the last value of each {period}, and the deepest drawdowns.",
            "图中为每{period}末的数值及最深回撤点。",
        ),
        "growth": ("Growth of 1", "净值"),
        "drawdown": ("Drawdown", "回撤"),
        "linear": ("Linear", "线性"),
        "log": ("Log", "对数"),
        "range_1m": ("1M", "1 个月"),
        "range_3m": ("3M", "3 个月"),
        "range_6m": ("6M", "6 个月"),
        "range_1y": ("1Y", "1 年"),
        "range_3y": ("3Y", "3 年"),
        "range_all": ("All", "全部"),
        "monthly": ("Monthly returns", "月度收益"),
        "monthly_note": (
            "The first and the last month are those of the span, not whole ones. Years compound "
            "their months.",
            "首月与末月按区间起止计算，可能不是整月。年度收益为各月复利。",
        ),
        "months": (
            "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec",
            "1月 2月 3月 4月 5月 6月 7月 8月 9月 10月 11月 12月",
        ),
        "year": ("Year", "全年"),
        "holdings": ("Holdings", "持仓"),
        "holdings_note": (
            "Share of the book's value at each decision, largest holdings first.",
            "每次决策时各资产占组合价值的比例，按平均持仓从大到小排列。",
        ),
        "free_cash": ("Cash", "现金"),
        "other_assets": ("{n} others", "其他 {n} 只"),
        "share": ("Share of the book", "占组合比例"),
        "actions": ("Actions", "动作"),
        "actions_note": (
            "Share of each action among all assets and bars of a {period}.",
            "每{period}内，各动作占全部资产与 K 线决策的比例。",
        ),
        "actions_targets": (
            "This agent sets target weights: a target more than 0.1 % of the book from the holding "
            "counts as a buy or a sell.",
            "该智能体输出目标权重：目标与持仓相差超过组合价值的 0.1 % 记为买入或卖出。",
        ),
        "decided": ("Share of decisions", "决策占比"),
        "buy": ("Buy", "买入"),
        "sell": ("Sell", "卖出"),
        "hold": ("Hold", "持有"),
        "period_bar": ("bar", "根 K 线"),
        "period_day": ("day", "日"),
        "period_week": ("week", "周"),
        "period_month": ("month", "月"),
        "period_quarter": ("quarter", "季度"),
        "period_year": ("year", "年"),
        "costs": ("Costs", "交易成本"),
        "costs_note": (
            "Per cent of the initial value. The benchmark index trades without costs by "
            "construction.",
            "占初始资金的百分比。基准指数按设定不计交易成本。",
        ),
        "costs_free": (
            "Fees were switched off in this evaluation (eval.use_fee: false).",
            "本次评估关闭了费用（eval.use_fee: false）。",
        ),
        "costs_over_time": ("Paid so far", "累计支付"),
        "costs_by_book": ("Paid in all", "合计支付"),
        "commission": ("Commission", "佣金"),
        "stamp": ("Stamp duty", "印花税"),
        "slippage": ("Slippage", "滑点"),
        "of_initial": ("% of initial value", "占初始资金 %"),
        "rejected": ("Orders cut or not filled", "被削减或未成交的订单"),
        "rejected_none": (
            "Every order was filled whole, or with all the cash there was.",
            "所有订单均全部成交，或以全部可用现金成交。",
        ),
        "rejected_note": (
            "Number of orders by the first reason that applied; for the agent, the mean over "
            "seeds. Buys that are scaled to the cash there is, fees paid, count as filled.",
            "按首个适用原因统计的订单数；智能体一列为种子均值。按可用现金（扣除费用）缩放的买单计为成交。",
        ),
        "orders": ("Orders in all", "订单总数"),
        "orders_whole": ("Filled whole or with all the cash", "全部成交或用尽现金"),
        "reason": ("Reason", "原因"),
        "training": ("Training", "训练过程"),
        "training_note": (
            "By environment step. Thin lines are seeds, the bold one their mean; long logs are "
            "averaged in blocks. A diamond marks the checkpoint that was chosen and evaluated.",
            "横轴为环境步数。细线为各种子，粗线为均值；较长的日志按块取平均。"
            "菱形为被选中并用于评估的检查点。",
        ),
        "training_note_one": (
            "By environment step; long logs are averaged in blocks. The diamond marks the "
            "checkpoint that was chosen and evaluated.",
            "横轴为环境步数；较长的日志按块取平均。菱形为被选中并用于评估的检查点。",
        ),
        "reward": ("Reward, as scaled for learning", "平均奖励（训练尺度）"),
        "value_loss": ("Value loss", "价值损失"),
        "explained_variance": ("Returns' variance explained", "价值函数解释方差"),
        "policy_loss": ("Policy loss", "策略损失"),
        "entropy": ("Entropy per asset", "策略熵（每资产）"),
        "gradient_norm": ("Gradient norm", "梯度范数"),
        "critic_loss": ("Critics' loss", "价值网络损失"),
        "actor_loss": ("Actor's loss", "策略网络损失"),
        "action_entropy": ("Entropy of the actions", "动作熵"),
        "temperature": ("Temperature", "温度系数"),
        "valid_measure": ("Validation: {measure}", "验证集：{measure}"),
        "chosen": ("Chosen checkpoint", "选中的检查点"),
        "steps": ("Environment steps", "环境步数"),
        # Tables.
        "measures": ("Measures", "绩效指标"),
        "measures_note": (
            "Mean ± standard deviation over seeds. The best value of a row is marked; cash is left "
            "out where less is better, and costs are not ranked.",
            "均值 ± 种子间标准差。每行最优值已标出；“越小越好”的指标不计现金，成本不参与比较。",
        ),
        "measures_note_one": (
            "The best value of a row is marked; cash is left out where less is better, and costs "
            "are not ranked.",
            "每行最优值已标出；“越小越好”的指标不计现金，成本不参与比较。",
        ),
        "measure": ("Measure", "指标"),
        "by_seed": ("Every seed by itself", "各种子明细"),
        "facts": ("How this was made", "来源与可复现性"),
        "fact_command": ("Trained by", "训练命令"),
        "fact_evaluate": ("Evaluated by", "评估命令"),
        "fact_report": ("Report by", "报告命令"),
        "fact_evaluated": ("Evaluated at", "评估时间"),
        "fact_code": ("Code", "代码版本"),
        "fact_config": ("Configuration", "配置指纹"),
        "fact_data": ("Data", "数据指纹"),
        "fact_prepared": ("Prepared set", "特征集指纹"),
        "fact_seeds": ("Seeds", "随机种子"),
        "fact_splits": ("Splits", "数据划分"),
        "fact_assets": ("Assets", "资产数量"),
        "fact_fill": ("Orders fill at", "成交时点"),
        "fact_prices": ("Ledger prices", "账本价格"),
        "fact_rules": ("Market rules", "交易规则"),
        "fact_idle": ("Rules that cannot act", "无法生效的规则"),
        "fact_actions": ("Actions taken", "动作选取"),
        "fact_encoder": ("Encoder out of sample", "编码器样本外表现"),
        "encoder_drawn": ("as drawn, not pre-trained", "随机初始化，未预训练"),
        "encoder_score": (
            "{target}: R² {own}, ridge {linear}, last value {last}; squared error saved, of the "
            "ridge's: {gain} ({low} to {high})",
            "{target}：R² {own}，岭回归 {linear}，末值 {last}；"
            "相对岭回归减少的平方误差：{gain}（{low} 至 {high}）",
        ),
        "fact_adapter": ("Adapter", "适配器"),
        "adapter_share": (
            "{trained} of {whole} encoder weights train ({share} %)",
            "编码器 {whole} 个权重中训练 {trained} 个（{share} %）",
        ),
        "fact_replay": ("Replay", "经验回放"),
        "replay_size": (
            "{size} bytes a transition, {whole} for {capacity}",
            "每条转移 {size} 字节，{capacity} 条共 {whole}",
        ),
        "fact_reads": ("Times evaluated", "评估次数"),
        "fact_year": ("Bars a year", "每年 K 线数"),
        "fact_versions": ("Libraries", "依赖版本"),
        "greedy": ("the most probable one (deterministic)", "概率最大的动作（确定性）"),
        "sampled": ("sampled", "按概率抽样"),
        "rules": ("{preset}{whence}: ", "{preset}{whence}："),
        "rules_auto": (" (auto)", "（自动）"),
        "rules_calendar": (" on calendar {calendar}", "，日历 {calendar}"),
        "rules_drawn": (" on a drawn market", "，模拟市场"),
        "rules_commission": ("commission {bps} bp a side{minimum}", "佣金单边 {bps} bp{minimum}"),
        "fee_minimum": (" (at least {amount} an order)", "（每单最低 {amount}）"),
        "stamp_none": ("no stamp duty", "无印花税"),
        "stamp_cn": ("stamp duty on sells", "卖出收印花税"),
        "slippage_none": ("no slippage", "无滑点"),
        "slippage_fixed": ("slippage {bps} bp", "固定滑点 {bps} bp"),
        "slippage_linear": (
            "slippage linear in participation ({bps} bp at the whole volume)",
            "滑点与参与率成正比（占全部成交量时 {bps} bp）",
        ),
        "slippage_sqrt": (
            "square-root slippage ({bps} bp at the whole volume)",
            "滑点与参与率平方根成正比（占全部成交量时 {bps} bp）",
        ),
        "cap": ("at most {share} % of the volume", "成交量参与上限 {share} %"),
        "cap_none": ("no volume cap", "无成交量上限"),
        "lots_on": ("whole lots", "整手买入"),
        "lots_off": ("fractional shares", "可买零股"),
        "t_plus_one_on": ("T+1", "T+1"),
        "t_plus_one_off": ("no T+1", "无 T+1"),
        "price_limits_on": ("price limits", "涨跌停限制"),
        "price_limits_off": ("no price limits", "无涨跌停限制"),
        "least_order": ("orders of at least {value}", "单笔至少 {value}"),
        "rules_fill": ("; fills at {fill}", "；成交于{fill}"),
        "rules_executor": (
            "; in evaluations orders are worked by {executor}",
            "；评估时由 {executor} 执行订单",
        ),
        "rules_uncharged": (
            "; evaluations charge nothing (eval.use_fee: false)",
            "；评估不计成本（eval.use_fee: false）",
        ),
        "rules_idle": (". Cannot act here: {idle}", "。以下规则在此无法生效：{idle}"),
        "rules_why": ("{rules} ({why})", "{rules}（{why}）"),
        "costs_idle": (
            "Of the rules that are set, these cannot act on these data: {idle}.",
            "已设置但在该数据上无法生效的规则：{idle}。",
        ),
        "rule_slippage": ("slippage", "滑点"),
        "rule_participation": ("the volume cap", "成交量上限"),
        "rule_stamp_duty": ("stamp duty", "印花税"),
        "rule_lots": ("lots", "整手规则"),
        "rule_price_limits": ("price limits", "涨跌停限制"),
        "rule_fill": ("fills at the open", "开盘成交"),
        "why_no_volume": ("the data have no volume", "数据无成交量"),
        "why_drawn_volume": (
            "drawn markets have no volume, but for those that go through files",
            "模拟市场无成交量，经由文件的市场除外",
        ),
        "why_no_opens": ("the data have no opens", "数据无开盘价"),
        "why_no_limits": ("the data have no limits", "数据无涨跌停价"),
        "why_no_lots": ("no symbol is an A-share", "没有 A 股代码"),
        "why_adjusted": ("the data have adjusted prices only", "数据只有复权价"),
        "why_drawn": ("the market is drawn, of no exchange", "模拟市场，不属于任何交易所"),
        "config_folded": ("Resolved configuration", "完整配置"),
        "to": ("to", "至"),
        "unknown": ("not recorded", "未记录"),
        "footer": (
            "Made by Echelon from saved results; nothing is loaded from a network.",
            "由 Echelon 根据已保存的结果生成；不加载任何网络资源。",
        ),
        "past": (
            "Past results on historical data do not predict future ones.",
            "历史回测结果不预示未来表现。",
        ),
    }
)

TEXTS: Mapping[str, Pair] = MappingProxyType(
    {**_RUN_TEXTS, **TRUST_TEXTS, **WALK_FORWARD_TEXTS, **HIERARCHY_TEXTS, **EXECUTION_TEXTS}
)
"""Of a run's page, of what its numbers are worth, and of a walk-forward's page."""

NAMES: Mapping[str, Pair] = MappingProxyType(
    {
        "benchmark": ("Benchmark", "基准指数"),
        "buy_and_hold": ("Buy & hold", "买入持有"),
        "equal_weight": ("Equal weight", "等权"),
        "min_variance": ("Min. variance", "最小方差"),
        "hrp": ("HRP", "分层风险平价"),
        "momentum": ("Momentum", "动量"),
        "random": ("Random", "随机"),
        "cash": ("Cash", "现金"),
    }
)

IN_TEXT: Mapping[str, str] = MappingProxyType(
    {
        "benchmark": "the benchmark",
        "buy_and_hold": "buy & hold",
        "equal_weight": "equal weight",
        "min_variance": "minimum variance",
        "hrp": "HRP",
        "momentum": "the momentum rule",
        "random": "random trading",
        "cash": "cash",
    }
)

REASONS: Mapping[str, Pair] = MappingProxyType(
    {
        "suspended": ("No trade in the asset at the bar", "当根 K 线停牌或无成交"),
        "delisted": ("Asset delisted", "已退市"),
        "limit_up": ("At its upper limit", "涨停"),
        "limit_down": ("At its lower limit", "跌停"),
        "not_held": ("Less held than ordered", "持仓不足"),
        "t_plus_one": ("Bought in the same session (T+1)", "当日买入不可卖出（T+1）"),
        "volume": ("Above the allowed share of volume", "超过成交量参与上限"),
        "cash": ("Not enough cash", "现金不足"),
        "lot": ("Rounded down to whole lots", "按整手取整"),
        "not_member": ("Not in the universe at the bar", "当日不在投资范围内"),
        "too_small": ("Below the least value of an order", "低于最小订单金额"),
    }
)

MEASURES_ZH: Mapping[str, Pair] = MappingProxyType(
    {
        "total_return": ("总收益率", "整个区间的收益。"),
        "annual_return": ("年化收益率", "年复合增长率。"),
        "volatility_period": ("波动率（每期）", "收益率的标准差。"),
        "volatility_annual": ("年化波动率", "每期波动率乘以每年期数的平方根。"),
        "sharpe_period": ("夏普比率（每期）", "均值除以标准差，未年化。"),
        "sharpe_annual": ("夏普比率（年化）", "均值除以标准差，乘以每年期数的平方根。"),
        "sortino_annual": ("索提诺比率（年化）", "均值除以下行标准差，乘以每年期数的平方根。"),
        "calmar": ("卡玛比率", "年化收益率除以最大回撤。"),
        "max_drawdown": ("最大回撤", "净值自高点的最大跌幅。"),
        "cvar95": ("CVaR 95 %", "最差 5 % 时期的平均亏损。"),
        "turnover_annual": ("年换手率（双边）", "每年买卖金额之和除以组合价值。"),
        "hit_rate": ("胜率", "非零收益时期中盈利的比例。"),
        "exposure": ("平均仓位", "非现金资产占组合价值的平均比例。"),
        "cost_total": ("交易成本", "全部成本金额。"),
        "cost_share": ("成本占初始资金", "全部成本除以初始资金。"),
        "cost_commission": ("佣金", "支付的佣金金额。"),
        "cost_stamp": ("印花税", "卖出印花税金额。"),
        "cost_slippage": ("滑点", "成交价劣于报价造成的损失金额。"),
    }
)

LEDGER: Mapping[str, Pair] = MappingProxyType(
    {
        "the close the decision was made on": (
            "the close the decision was made on",
            "决策当根 K 线的收盘价",
        ),
        "the next bar's open": ("the next bar's open", "下一根 K 线的开盘价"),
        "the next bar's close (the source has no opens)": (
            "the next bar's close (the source has no opens)",
            "下一根 K 线的收盘价（数据源无开盘价）",
        ),
        "raw": ("raw, with corporate actions", "未复权，并处理公司行为"),
        "split_adjusted": ("adjusted for splits", "拆股复权"),
        "adjusted": (
            "adjusted for splits and dividends; lots and price limits are off",
            "复权价（含拆股与分红）；不适用整手与涨跌停规则",
        ),
    }
)
