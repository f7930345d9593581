"""What the page of a walk-forward says, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

WALK_FORWARD_TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "walk_title": ("Walk-forward report", "滚动前推报告"),
        "walk_span": (
            "{folds} test windows, {first} to {last}, {bars} returns",
            "{folds} 个测试区间，{first} 至 {last}，共 {bars} 期收益",
        ),
        "walk_caution": (
            "What somebody got who trained new agents before every test window and traded them "
            "through it. Each fold begins with cash; the first bar of a window is the one it first "
            "decides on, so that one return per fold is in no series, neither the agents' nor the "
            "baselines'. ± is the standard deviation over seeds.",
            "相当于在每个测试区间之前重新训练智能体，并用其交易该区间。每一折均从现金开始；"
            "区间首根 K 线仅用于首次决策，因此每折有一期收益不在任何序列中（基准策略同样如此）。"
            "± 为种子间标准差。",
        ),
        "walk_unstitched": (
            "The test windows are not put together, because not every fold is complete. Mend what "
            "can be and go on with: {command}",
            "并非每一折都已完成，因此测试区间未能拼接。请修复后继续：{command}",
        ),
        "walk_uncounted": (
            "Configurations tried elsewhere before this walk-forward are not counted.",
            "在此次滚动前推之外尝试过的配置未计入。",
        ),
        "windows": ("Windows", "区间划分"),
        "windows_note": (
            "Features, scaler, training and the choice of a checkpoint know the train and "
            "validation windows of their fold only. Dropped: {purge} between train and "
            "validation, {embargo} between validation and test.",
            "特征、标准化、训练与检查点选择只使用本折的训练与验证区间。"
            "训练与验证之间舍弃 {purge}，验证与测试之间舍弃 {embargo}。",
        ),
        "windows_partial": (
            "The last test window is partial: {bars} bars.",
            "最后一个测试区间不完整：{bars} 根 K 线。",
        ),
        "bars_n": ("{n} bars", "{n} 根 K 线"),
        "bars_one": ("1 bar", "1 根 K 线"),
        "by_fold": ("Fold by fold", "逐折结果"),
        "by_fold_note": (
            "Test windows. Agent: mean ± standard deviation over {n} seeds. The last line is of "
            "the stitched series, not a mean of the lines above.",
            "各测试区间。智能体为 {n} 个种子的均值 ± 标准差。末行为拼接序列的结果，"
            "并非以上各行的平均。",
        ),
        "by_fold_note_one": (
            "Test windows. The last line is of the stitched series, not a mean of the lines above.",
            "各测试区间。末行为拼接序列的结果，并非以上各行的平均。",
        ),
        "fold": ("Fold", "折"),
        "stitched": ("Stitched", "拼接"),
        "fold_failed": ("failed: {problem}", "失败：{problem}"),
        "fold_incomplete": ("not complete", "未完成"),
        "every_measure": ("Every measure, by fold", "全部指标（逐折）"),
        "sharpe_by_fold": ("Sharpe ratio by fold", "逐折夏普比率"),
        "dsr_said_walk": (
            "Probability that it is above {hurdle} a year, which the best of {n} looks at these "
            "test windows is expected to show by chance without skill.",
            "真实夏普比率高于 {hurdle}（年化）的概率；毫无能力时，对这些测试区间的 {n} 次查看中"
            "最好的一次，仅凭偶然预期即可达到该值。",
        ),
        "walk_looks": ("Looks at these windows", "测试区间查看次数"),
        "walk_looks_said": (
            "Of the window looked at most often, by all runs in this folder, this time included; "
            "taken as independent of one another. Each was written down before the window was "
            "opened.",
            "查看最多的区间的次数（同一文件夹内所有运行，含本次），视为相互独立。"
            "每次均在打开数据之前登记。",
        ),
        "fact_scheme": ("Scheme", "方案"),
        "scheme": (
            "{scheme}; {unit}: {train} to train, {valid} to validate, {test} to test",
            "{scheme}；{unit}：训练 {train}，验证 {valid}，测试 {test}",
        ),
        "scheme_rolling": ("rolling", "滚动窗口"),
        "scheme_expanding": ("expanding", "扩展窗口"),
        "unit_year": ("calendar years", "按自然年"),
        "unit_month": ("calendar months", "按自然月"),
        "all_before": ("all before", "此前全部"),
        "fact_folds": ("Folds", "折数"),
        "fact_steps": ("Steps per agent", "每智能体步数"),
        "fact_directory": ("Runs", "运行目录"),
    }
)
