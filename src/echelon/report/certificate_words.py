"""Every word of a certificate, in English and Chinese, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from echelon.errors import UsageError
from echelon.proving.certificate import Bar, Certificate, Check

Lang = Literal["en", "zh"]
Pair = tuple[str, str]


class CertificateWords:
    """The texts of one language."""

    def __init__(self, lang: str) -> None:
        if lang not in get_args(Lang):
            raise UsageError(f"no certificate in language {lang!r}: choose en or zh.")
        self.lang = lang
        self._column = get_args(Lang).index(lang)

    def __call__(self, key: str, **fields: object) -> str:
        """The text of `key`, its fields filled in."""
        return TEXTS[key][self._column].format(**fields)

    def policy(self, name: str) -> str:
        """What a policy is called."""
        if name.startswith(("momentum ", "reversal ", "relative ")):
            kind, bars = name.rsplit(" ", 1)
            return self("rule", kind=POLICIES[kind][self._column], bars=bars)
        return POLICIES[name][self._column]

    def mode(self, certificate: Certificate) -> str:
        """How large a proof it is."""
        sizes, pace = (certificate.about.get(name, {}) for name in ("sizes", "pace"))
        said = self(f"mode_{certificate.mode}", **{name: f"{n:,}" for name, n in sizes.items()})
        return said + (self("mode_pace", **pace) if pace else "")

    def number(self, value: float | None, unit: str) -> str:
        """As read: shares in per cent, Sharpe ratios to two places."""
        if value is None or not math.isfinite(value):
            return "–"
        return f"{value:.1%}" if unit == "share" else f"{value:.2f}"

    def result(self, check: Check) -> str:
        """The estimate of a check."""
        if check.unit == "names":
            return ", ".join(check.names) or self("nothing")
        if check.count is not None:
            k, n = check.count
            return self("k_of_n", k=k, n=n, share=self.number(check.estimate, "share"))
        return self.number(check.estimate, check.unit)

    def interval(self, check: Check) -> str:
        """Its interval; a dash without one."""
        if check.low is None or check.high is None:
            return "–"
        low, high = (self.number(end, check.unit) for end in (check.low, check.high))
        return self("interval", low=low, high=high)

    def bar(self, check: Check) -> str:
        """What it is held to."""
        if check.unit == "names":
            return self("bar_names")
        if not check.bars:
            return self("information")
        return self("and").join(self._bar(bar, check) for bar in check.bars)

    def verdict(self, passed: bool | None) -> str:
        """Passed, failed, or neither."""
        if passed is None:
            return "–"
        return self("passed" if passed else "failed")

    def _bar(self, bar: Bar, check: Check) -> str:
        value = f"{bar.value:.0%}" if check.unit == "share" else f"{bar.value:g}"
        return self(f"bar_{bar.of}", side=self(bar.side), value=value)


TEXTS: Mapping[str, Pair] = MappingProxyType(
    {
        "title": ("Certificate of the proving ground", "验证场证书"),
        "passed": ("passed", "通过"),
        "failed": ("FAILED", "未通过"),
        "all_passed": (
            "The pipeline finds what is there, and claims nothing where nothing is.",
            "该流程能找到确实存在的规律，也不会在没有规律处宣称发现。",
        ),
        "some_failed": ("Not passed: {markets}.", "未通过：{markets}。"),
        "left_out": ("Not run: {markets}.", "未运行：{markets}。"),
        "some_passed": ("Passed: {markets}.", "通过：{markets}。"),
        "mode_quick": (
            "Quick mode: fewer seeds, steps and draws than the full proof.",
            "快速模式：种子、步数与抽样均少于完整验证。",
        ),
        "mode_full": ("Full proof.", "完整验证。"),
        "mode_pace": (
            " Hurried, by the same method: pre-training of at most {epochs} passes over "
            "{pass_rows} bars, at least {updates_per_step:g} updates a step and a learning rate of "
            "{lr:g}, warm-up of at most {warmup} updates.",
            "方法相同、进度加快：预训练至多 {epochs} 轮、每轮 {pass_rows} 根，"
            "每步至少 {updates_per_step:g} 次更新，学习率至少 {lr:g}，预热至多 {warmup} 次更新。",
        ),
        "mode_reduced": (
            "Reduced by the command line: {seeds} seeds and {draws} unseen draws of {bars} bars on "
            "the planted market, {null_draws} draws of the null market.",
            "命令行缩减：植入信号市场 {seeds} 个种子、{draws} 个未见抽样（每个 {bars} 根），"
            "无信号市场 {null_draws} 个抽样。",
        ),
        "market": ("market", "市场"),
        "check": ("what is measured", "测量内容"),
        "result": ("result", "结果"),
        "interval_95": ("95 % interval", "95 % 区间"),
        "bar": ("bar", "标准"),
        "verdict": ("verdict", "结论"),
        "interval": ("{low} to {high}", "{low} 至 {high}"),
        "k_of_n": ("{k} of {n} ({share})", "{n} 中 {k}（{share}）"),
        "and": (", ", "，"),
        "at least": ("at least", "不低于"),
        "at most": ("at most", "不高于"),
        "above": ("above", "高于"),
        "bar_estimate": ("{side} {value}", "{side} {value}"),
        "bar_low": ("lower end {side} {value}", "区间下限{side} {value}"),
        "bar_high": ("upper end {side} {value}", "区间上限{side} {value}"),
        "bar_names": ("that factor and no other", "恰为该因子"),
        "information": ("informs, no bar", "仅供参考"),
        "nothing": ("nothing", "无"),
        "policy": ("policy", "策略"),
        "sharpe": ("Sharpe ratio", "夏普比率"),
        "share": ("share", "占比"),
        "turnover": ("turnover a year", "年换手"),
        "claims": ("claims", "宣称次数"),
        "rule": ("{kind}, {bars} bars", "{kind}（{bars} 根）"),
        "at_fee": ("{policy}, {fee} bp", "{policy}，{fee} 基点"),
        # Markets
        "market_planted": ("Planted", "植入信号"),
        "market_regime": ("Regime", "隐藏状态"),
        "market_null": ("Null", "无信号"),
        "market_leaky": ("Leaky", "泄漏"),
        "market_costly": ("Costly", "高成本"),
        "about_planted": (
            "A signal of known strength is hidden in noise. The reference is the Bayes filter: it "
            "knows the market's law, has the exact probability of what is hidden, and trades "
            "under the same rules, costs and clock. The result is the share of its Sharpe ratio "
            "that the agent captures on draws nobody has seen. The filter is the best judge of "
            "the signal, not the best trader under the rules: a rule of thumb that happens to fit "
            "the market can come out a little above it.",
            "在噪声中植入强度已知的信号。参考为贝叶斯滤波器：它知道市场规律，掌握隐藏状态的精确概"
            "率，并在相同规则、成本与时序下交易。结果为智能体在未见过的抽样上取得其夏普比率的比例"
            "。滤波器对信号的判断最优，但在交易规则下未必是最优交易者：恰好契合市场的经验规则可能"
            "略高于它。",
        ),
        "about_regime": (
            "A signal everybody sees changes its meaning now and then, and when is hidden. Each "
            "draw is paired with its mirror, on which every rule that looks at the signal alone "
            "loses what it earned. Who looks at what the experts' books earned can tell the "
            "regime.",
            "所有人都能看到的信号，其含义不时反转，而反转时刻是隐藏的。每个抽样都配有镜像，"
            "只看信号的规则在镜像中会输掉所得。观察专家账户收益者可以判断当前状态。",
        ),
        "about_null": (
            "Volatility clusters, heavy tails, a common factor, a risk premium and costs, and "
            "nothing to find: equal weight is the best there is. A claim needs the lower 97.5 % "
            "bound of the advantage over equal weight above 0 (block bootstrap, two block "
            "lengths) and a deflated Sharpe ratio above 0.95. Beside it: how often the same rule "
            "claims on the trend market, over windows of the same length.",
            "有波动聚集、厚尾、共同因子、风险溢价与成本，但没有可发现的规律：等权即最优。"
            "宣称须满足：相对等权优势的 97.5 % 下限高于 0（分块自助法，两种块长），"
            "且去膨胀夏普比率高于 0.95。另列同一规则在趋势市场、同样长度窗口上的宣称频率。",
        ),
        "about_leaky": (
            "A factor file as a user might write one knows tomorrow's return, in a market of pure "
            "noise. The leakage check must name it. Trained on it all the same, the agent must "
            "show an absurd Sharpe ratio: a pipeline that could not show this edge could show "
            "none.",
            "一个如用户所写的因子文件包含次日收益，市场为纯噪声。泄漏检查必须点名该因子。若仍用它"
            "训练，智能体应显示荒谬的夏普比率：连这种优势都显示不出的流程，什么也显示不了。",
        ),
        "about_costly": (
            "The trend market with trends of 25 bars, at 5 basis points a side, which they are "
            "worth, and at 500, which they are not. The agent is trained and tested at each fee.",
            "趋势平均持续 25 根 K 线的市场：单边 5 基点值得交易，500 基点则不值得。"
            "智能体分别在两种费率下训练与测试。",
        ),
        # Checks
        "check_trend_share": (
            "trend: share of the Bayes filter's Sharpe ratio",
            "趋势：占贝叶斯滤波器夏普比率的比例",
        ),
        "check_reversion_share": ("mean reversion: the same share", "均值回复：同一比例"),
        "check_cross_section_share": ("cross-section: the same share", "横截面：同一比例"),
        "check_regime_trailing 40": (
            "trailing-40 switch over the best that cannot know",
            "近 40 根切换，相对最佳盲策略的优势",
        ),
        "check_regime_fixed-share hedge": (
            "fixed-share hedge over the best that cannot know",
            "固定份额对冲，相对最佳盲策略的优势",
        ),
        "check_regime_regime filter": (
            "regime filter (HMM) over the best that cannot know",
            "状态滤波器（HMM），相对最佳盲策略的优势",
        ),
        "check_regime_flat_agent": (
            "flat agent that sees the signal alone",
            "只看信号的单层智能体",
        ),
        "check_regime_shown_agent": (
            "flat agent shown what a router sees",
            "获得路由器观测的单层智能体",
        ),
        "check_regime_share": (
            "hierarchy: share of the regime filter's Sharpe ratio",
            "层级：占状态滤波器夏普比率的比例",
        ),
        "check_regime_over_best single expert": (
            "hierarchy over its best single expert",
            "层级相对其最佳单个专家的优势",
        ),
        "check_regime_over_flat sac": (
            "hierarchy over flat SAC that sees the signal alone",
            "层级相对只看信号的单层 SAC 的优势",
        ),
        "check_regime_over_flat a2c": (
            "hierarchy over flat A2C that sees the signal alone",
            "层级相对只看信号的单层 A2C 的优势",
        ),
        "check_null_claims": ("claims where nothing is", "无信号处的宣称"),
        "check_null_power": ("claims on the trend market", "趋势市场上的宣称"),
        "check_leaky_refused": ("refused by the leakage check", "泄漏检查拒绝的因子"),
        "check_leaky_sharpe": ("Sharpe ratio with the peeking factor", "含偷看因子时的夏普比率"),
        "check_leaky_gap": ("the same, less the honest agent's", "减去诚实智能体的夏普比率"),
        "check_costly_share": (
            "5 bp: share of the Bayes filter's Sharpe ratio",
            "5 基点：占贝叶斯滤波器夏普比率的比例",
        ),
        "check_costly_turnover": (
            "500 bp: turnover, as a share of that at 5 bp",
            "500 基点：换手相对 5 基点时的比例",
        ),
        # Notes
        "note_planted_others": (
            "The bars of 85 % and 80 % are the trend's. Mean reversion and the cross-section are "
            "held to finding anything at all.",
            "85 % 与 80 % 的标准只用于趋势；均值回复与横截面只要求确有所得。",
        ),
        "note_planted_weights": (
            "The agent says target weights, and so does the filter: it holds equal parts of the "
            "assets of which it expects enough, and cash for the rest. One bar for every signal.",
            "智能体给出目标权重，滤波器亦然：等份持有预期足够高的资产，其余为现金。各信号标准相同。",
        ),
        "note_costly_weights": (
            "The agent says target weights, and so do the filters: equal parts of the assets of "
            "which they expect enough. The plain one rebalances at every bar, whatever that costs; "
            "the one with thresholds buys and sells whole parts, and nothing in between.",
            "智能体给出目标权重，滤波器亦然：等份持有预期足够高的资产。普通滤波器每根 K 线再平衡，"
            "不计成本；带阈值者只整份买卖，其间不动。",
        ),
        "note_regime_information": (
            "The advantage of those that choose is information: they see what the experts earned, "
            "the others do not. It does not show that a hierarchy is better than a flat agent "
            "that is shown the same.",
            "选择者的优势来自信息：它们能看到专家的收益，其他策略不能。"
            "这并不说明层级结构优于获得同样信息的单层智能体。",
        ),
        "note_regime_agents": (
            "Flat agents see neither returns nor holdings; over a pair, one that sees the signal "
            "alone can earn nothing. A router is proved with a hierarchy.",
            "单层智能体既看不到收益也看不到持仓；只看信号者在成对抽样上不可能获利。路由器属于层级"
            "结构的验证。",
        ),
        "note_regime_references_only": (
            "References only; flat agents are part of the full proof, a router is proved with a "
            "hierarchy.",
            "仅含参考策略；单层智能体属于完整验证，路由器属于层级结构的验证。",
        ),
        "note_regime_hierarchy": (
            "Experts, router and flat agents see neither returns nor holdings, but the router sees "
            "what the experts' books earned. Flat agents were trained on the same draws for as "
            "many environment steps; those shown what a router sees are reported, not held to a "
            "bar.",
            "专家、路由器与单层智能体均看不到收益与持仓，但路由器能看到各专家账户的收益。"
            "单层智能体在相同抽样上训练相同的环境步数；获得路由器观测者仅作报告，不设标准。",
        ),
        "note_regime_one_seed": (
            "One hierarchy, trained briefly: it informs and is held to no bar. The full proof has "
            "several, and bars.",
            "仅一个简短训练的层级：供参考，不设标准。完整验证含多个种子并设标准。",
        ),
        "note_regime_no_flat": (
            "No flat agents were trained beside the hierarchy; the full proof has them.",
            "未在层级之外训练单层智能体；完整验证包含它们。",
        ),
        "note_null_trials": (
            "An agent is one configuration, so one trial (its seeds are averaged); the rule is the "
            "best of twelve on validation, so twelve trials.",
            "智能体为单一配置，计一次试验（种子取均值）；规则为验证集上十二选一，计十二次试验。",
        ),
        "note_null_stand_ins": (
            "Agents were trained through the whole pipeline on {agents} draws. On the others cheap "
            "policies stand in, in turn: {cheap}.",
            "在 {agents} 个抽样上用完整流程训练了智能体；其余由廉价策略轮流代替：{cheap}。",
        ),
        "note_null_cheap_only": (
            "No agent was trained on null draws in the quick mode; cheap policies stand in, in "
            "turn: {cheap}.",
            "快速模式未在无信号抽样上训练智能体；由廉价策略轮流代替：{cheap}。",
        ),
        "note_leaky_separate": (
            "The check is a command of its own, `echelon data check --leakage`; training does not "
            "run it. The agents here were trained without it.",
            "泄漏检查是单独的命令 `echelon data check "
            "--leakage`，训练不会自动执行；此处的智能体未经检查即训练。",
        ),
        # Pictures
        "pic_share": (
            "Share of the Bayes filter's Sharpe ratio; rings: single seeds",
            "占贝叶斯滤波器夏普比率的比例；圆环为各种子",
        ),
        "pic_sharpe_pairs": (
            "Annual Sharpe ratio over mirrored pairs; rings: single pairs",
            "镜像对的年化夏普比率；圆环为各对",
        ),
        "pic_sharpe_hierarchy": (
            "Annual Sharpe ratio over mirrored pairs; rings: single pairs, of the hierarchy and of "
            "what was trained with it or beside it single seeds",
            "镜像对的年化夏普比率；圆环为各对，层级及与之一同训练者为各种子",
        ),
        "pic_in_charge": (
            "Who was in charge over the first test draw, coloured by the regime that was hidden "
            "(seed {seed}). Over all test draws the choice tells {bits} of {of} bits of the "
            "regime: {share}.",
            "首个测试抽样中各时刻由谁负责，颜色为当时隐藏的状态（种子 {seed}）。"
            "在全部测试抽样上，该选择含有状态信息 {bits} 比特，状态熵为 {of} 比特：{share}。",
        ),
        "pic_in_charge_seeds": (
            " {seeds} seeds: {mean} on average, {low} to {high}.",
            "{seeds} 个种子：平均 {mean}，{low} 至 {high}。",
        ),
        "lane_hidden": ("hidden regime", "隐藏状态"),
        "lane_up": ("following the signal pays", "顺从信号获利"),
        "lane_down": ("opposing it pays", "反向信号获利"),
        "lane_in_charge": ("bars", "时间占比"),
        "lane_of_that": ("of these blue", "其中蓝色"),
        "lane_expert": ("expert {number}", "专家 {number}"),
        "lane_cash": ("cash", "现金"),
        "pic_low": (
            "Lower 97.5 % bound of the annual Sharpe ratio's advantage over equal weight, one "
            "mark per draw; right of the line the first half of a claim is met",
            "相对等权的年化夏普优势的 97.5 % 下限，每个抽样一个标记；线右侧即满足宣称的前半条件",
        ),
        "pic_sharpe": (
            "Annual Sharpe ratio on the test window; rings: single seeds",
            "测试窗口年化夏普比率；圆环为各种子",
        ),
        "pic_turnover": (
            "Turnover a year, as a multiple of the book; rings: single seeds",
            "年换手（账户价值的倍数）；圆环为各种子",
        ),
        # Facts
        "facts": ("What it was made with", "运行信息"),
        "fact_command": ("Command", "命令"),
        "fact_mode": ("Mode", "模式"),
        "quick": ("quick", "快速"),
        "full": ("full", "完整"),
        "reduced": ("reduced", "缩减"),
        "fact_config_hash": ("Configuration", "配置"),
        "fact_rules": ("Market rules", "交易规则"),
        "fact_code": ("Code", "代码"),
        "fact_finished": ("Finished", "完成时间"),
        "fact_time": ("Time", "用时"),
        "time": (
            "{seconds} s in all, {cpu} CPU seconds on {cores} cores",
            "共 {seconds} 秒，{cores} 核 CPU 用时 {cpu} 秒",
        ),
        "fact_platform": ("Platform", "平台"),
        "sizes": ("Sizes", "规模"),
        "seeds": ("seeds {seeds}", "种子 {seeds}"),
        "steps": ("{steps} steps a training", "每次训练 {steps} 步"),
        "draws": ("{draws} unseen draws", "{draws} 个未见抽样"),
        "pairs": ("{pairs} mirrored pairs", "{pairs} 个镜像对"),
        "hierarchies": (
            "hierarchies: seeds {seeds}, {steps} steps a training, first {pairs} pairs",
            "层级：种子 {seeds}，每次训练 {steps} 步，前 {pairs} 对",
        ),
        "windows": (
            "windows of {train}, {valid} and {test} bars",
            "窗口 {train}、{valid}、{test} 根",
        ),
        "null_draws": ("{draws} draws", "{draws} 个抽样"),
        "spent": ("{cpu} CPU seconds", "CPU 用时 {cpu} 秒"),
        "footer": (
            "Made by Echelon. certificate.json beside this page has every number.",
            "由 Echelon 生成。同目录的 certificate.json 含全部数字。",
        ),
    }
)

POLICIES: Mapping[str, Pair] = MappingProxyType(
    {
        "agent": ("agent", "智能体"),
        "bayes": ("Bayes filter", "贝叶斯滤波器"),
        "thresholds": ("Bayes filter, best thresholds", "贝叶斯滤波器（最优阈值）"),
        "momentum": ("momentum", "动量"),
        "reversal": ("reversal", "反转"),
        "relative momentum": ("relative momentum", "相对动量"),
        "relative reversal": ("relative reversal", "相对反转"),
        "equal weight": ("equal weight", "等权"),
        "equal_weight": ("equal weight", "等权"),
        "follow": ("follow the signal", "顺从信号"),
        "oppose": ("oppose the signal", "反向信号"),
        "trailing 40": ("trailing-40 switch", "近 40 根切换"),
        "fixed-share hedge": ("fixed-share hedge", "固定份额对冲"),
        "regime filter": ("regime filter (HMM)", "状态滤波器（HMM）"),
        "regime-aware": ("regime-aware", "已知状态"),
        "hierarchy": ("hierarchy", "层级"),
        "hedge": ("fixed-share hedge over the trained experts", "对训练出的专家作固定份额对冲"),
        "oracle": ("trained experts, regime known", "训练出的专家，已知状态"),
        "best single expert": ("best single expert", "最佳单个专家"),
        "flat sac": ("flat SAC", "单层 SAC"),
        "shown sac": ("flat SAC shown what a router sees", "获得路由器观测的单层 SAC"),
        "flat a2c": ("flat A2C", "单层 A2C"),
        "shown a2c": ("flat A2C shown what a router sees", "获得路由器观测的单层 A2C"),
        "flat agent": ("flat agent, signal alone", "单层智能体（仅信号）"),
        "shown agent": ("flat agent, router's view", "单层智能体（路由器观测）"),
        "rules": ("best of twelve rules", "十二规则择优"),
        "random": ("random trading", "随机交易"),
        "min_variance": ("minimum variance", "最小方差"),
        "peeking": ("agent, peeking", "智能体（偷看）"),
        "honest": ("agent, honest", "智能体（诚实）"),
        "trend": ("trend", "趋势"),
        "reversion": ("mean reversion", "均值回复"),
        "cross_section": ("cross-section", "横截面"),
    }
)
