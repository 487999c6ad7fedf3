//! The plots of a replay, drawn as one SVG: batch and context over time, step times, padding.

use std::error::Error as StdError;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::stats::{Measured, StepRecord, percentile};
use crate::draw::{Area, BLUE, Drawn, GRID, MUTED, ORANGE, PALE, TEAL, font, key, tick, titled};
use crate::text;

/// Width and height of the drawing.
pub(crate) const SIZE: (u32, u32) = (1200, 940);

/// Most points that a line is drawn of; steps beyond are averaged.
const POINTS: usize = 560;

/// Draws all plots.
///
/// # Errors
/// What the drawing library says; it cannot fail on finite numbers.
pub(crate) fn draw(measured: &Measured) -> Result<String, Box<dyn StdError>> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let (batch, rest) = root.split_vertically(300);
        let (context, rest) = rest.split_vertically(300);
        let (times, rest) = rest.split_horizontally(400);
        let (padding, cost) = rest.split_horizontally(400);
        draw_batch(&batch, measured)?;
        draw_context(&context, measured)?;
        draw_times(&times, measured)?;
        draw_padding(&padding, measured)?;
        draw_cost(&cost, measured)?;
        root.present()?;
    }
    Ok(svg)
}

/// Mean of a value over runs of neighbouring steps, against the attention time at the run's end.
fn series(steps: &[StepRecord], value: impl Fn(&StepRecord) -> f64) -> Vec<(f64, f64)> {
    let mut clock = 0.0;
    let run = steps.len().div_ceil(POINTS).max(1);
    steps
        .chunks(run)
        .map(|steps| {
            clock += steps.iter().map(|step| step.seconds).sum::<f64>();
            (clock, steps.iter().map(&value).sum::<f64>() / steps.len() as f64)
        })
        .collect()
}

/// The end of an axis that holds `most`, which is at least 1 part in a million.
fn axis(most: f64) -> f64 {
    (most * 1.06).max(1e-6)
}

fn highest(points: &[(f64, f64)]) -> f64 {
    points.iter().map(|point| point.1).fold(0.0, f64::max)
}

fn draw_batch(area: &Area<'_>, measured: &Measured) -> Drawn {
    let rows = series(&measured.steps, |step| step.query_tokens as f64);
    let computed = series(&measured.steps, |step| (step.query_tokens + step.padding) as f64);
    let body = titled(area, "Batch", "query rows per step, over seconds of attention")?;
    key(area, &[("asked for", BLUE), ("padding", PALE)])?;
    let end = axis(rows.last().map_or(0.0, |point| point.0) / 1.06);
    let mut chart = ChartBuilder::on(&body)
        .set_label_area_size(LabelAreaPosition::Left, 52)
        .set_label_area_size(LabelAreaPosition::Bottom, 28)
        .build_cartesian_2d(0.0..end, 0.0..axis(highest(&computed)))?;
    mesh(&mut chart, 12, 5)?;
    chart.draw_series(AreaSeries::new(stairs(&computed), 0.0, PALE.mix(0.75)))?;
    chart.draw_series(AreaSeries::new(stairs(&rows), 0.0, WHITE))?;
    chart.draw_series(AreaSeries::new(stairs(&rows), 0.0, BLUE.mix(0.30)).border_style(BLUE.stroke_width(1)))?;
    Ok(())
}

fn draw_context(area: &Area<'_>, measured: &Measured) -> Drawn {
    let context = series(&measured.steps, |step| step.context_tokens as f64);
    let longest = series(&measured.steps, |step| step.longest as f64);
    let body = titled(area, "Context", "cached tokens read per step and layer, over seconds of attention")?;
    key(area, &[("all sequences", TEAL), ("longest sequence", ORANGE)])?;
    let end = axis(context.last().map_or(0.0, |point| point.0) / 1.06);
    let mut chart = ChartBuilder::on(&body)
        .set_label_area_size(LabelAreaPosition::Left, 52)
        .set_label_area_size(LabelAreaPosition::Bottom, 28)
        .build_cartesian_2d(0.0..end, 0.0..axis(highest(&context)))?;
    mesh(&mut chart, 12, 5)?;
    chart.draw_series(AreaSeries::new(stairs(&context), 0.0, TEAL.mix(0.22)).border_style(TEAL.stroke_width(1)))?;
    chart.draw_series(LineSeries::new(stairs(&longest), ORANGE.stroke_width(1)))?;
    Ok(())
}

/// A line that holds each value from the run's begin to its end.
fn stairs(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let begins = std::iter::once(0.0).chain(points.iter().map(|point| point.0));
    begins.zip(points).flat_map(|(begin, &(end, value))| [(begin, value), (end, value)]).collect()
}

fn draw_times(area: &Area<'_>, measured: &Measured) -> Drawn {
    let mut times: Vec<f64> = measured.steps.iter().map(|step| step.seconds).collect();
    times.sort_by(f64::total_cmp);
    let marks = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)].map(|(name, p)| (name, percentile(&times, p)));
    // The few longest steps would squeeze all others into one bar.
    let end = axis(percentile(&times, 0.995).max(marks[2].1));
    let beyond = times.iter().filter(|&&time| time > end).count();
    let note = match beyond {
        0 => "steps by their duration".to_owned(),
        _ => {
            format!("steps by their duration; {beyond} longer, up to {}", text::seconds(*times.last().unwrap_or(&0.0)))
        }
    };
    let body = titled(area, "Step time", &note)?;

    const BARS: usize = 44;
    let (scale, unit) = if end < 1e-3 { (1e6, "us") } else { (1e3, "ms") };
    let mut bars = [0_usize; BARS];
    for time in &times[..times.len() - beyond] {
        bars[((time / end * BARS as f64) as usize).min(BARS - 1)] += 1;
    }
    let most = axis(bars.iter().copied().max().unwrap_or(0) as f64 * 1.12);
    let mut chart = ChartBuilder::on(&body)
        .set_label_area_size(LabelAreaPosition::Left, 52)
        .set_label_area_size(LabelAreaPosition::Bottom, 28)
        .build_cartesian_2d(0.0..end * scale, 0.0..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_labels(6)
        .y_labels(5)
        .x_label_formatter(&|x| format!("{} {unit}", tick(*x)))
        .y_label_formatter(&|y| tick(*y))
        .label_style(font(14, &MUTED))
        .draw()?;
    let width = end * scale / BARS as f64;
    chart.draw_series(bars.iter().enumerate().filter(|(_, count)| **count > 0).map(|(i, &count)| {
        let mut bar =
            Rectangle::new([(i as f64 * width, 0.0), ((i + 1) as f64 * width, count as f64)], BLUE.mix(0.55).filled());
        bar.set_margin(0, 0, 0, 1);
        bar
    }))?;
    let mut last_label = f64::NEG_INFINITY;
    for (level, (name, value)) in marks.into_iter().enumerate() {
        let x = value * scale;
        // Marks close together would print over one another.
        let lower = if x - last_label < end * scale * 0.09 { 0.07 * level as f64 } else { 0.0 };
        last_label = x;
        chart.draw_series(LineSeries::new([(x, 0.0), (x, most * (0.93 - lower))], ORANGE.stroke_width(1)))?;
        let anchor = Pos::new(HPos::Center, VPos::Bottom);
        chart.draw_series([Text::new(name, (x, most * (0.94 - lower)), font(14, &ORANGE).pos(anchor))])?;
    }
    Ok(())
}

/// The batch sizes that steps ran at, with the rows asked for and the padding of each.
fn rows_by_size(measured: &Measured) -> Vec<(String, usize, usize)> {
    let mut sizes: Vec<(Option<usize>, usize, usize)> = Vec::new();
    for served in &measured.served {
        match sizes.iter_mut().find(|(size, ..)| *size == served.size) {
            Some((_, rows, padding)) => {
                *rows += served.query_tokens;
                *padding += served.padding;
            }
            None => sizes.push((served.size, served.query_tokens, served.padding)),
        }
    }
    sizes.sort_by_key(|(size, ..)| size.unwrap_or(usize::MAX));
    let name = |size: Option<usize>| size.map_or_else(|| "eager".to_owned(), |size| size.to_string());
    sizes.into_iter().map(|(size, rows, padding)| (name(size), rows, padding)).collect()
}

fn draw_padding(area: &Area<'_>, measured: &Measured) -> Drawn {
    let sizes = rows_by_size(measured);
    let note = format!("query rows by graph size; {} of all are padding", text::percent(measured.padding_share()));
    let body = titled(area, "Padding", &note)?;
    key(area, &[("asked for", BLUE), ("padding", PALE)])?;
    let most = axis(sizes.iter().map(|(_, rows, padding)| rows + padding).max().unwrap_or(0) as f64 * 1.04);
    let mut chart = ChartBuilder::on(&body)
        .set_label_area_size(LabelAreaPosition::Left, 52)
        .set_label_area_size(LabelAreaPosition::Bottom, 28)
        .build_cartesian_2d(0.0..sizes.len().max(1) as f64, 0.0..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .y_labels(5)
        .y_label_formatter(&|y| tick(*y))
        .label_style(font(14, &MUTED))
        .draw()?;
    for (i, (_, rows, padding)) in sizes.iter().enumerate() {
        let (left, right) = (i as f64 + 0.14, i as f64 + 0.86);
        let (rows, all) = (*rows as f64, (rows + padding) as f64);
        chart.draw_series([
            Rectangle::new([(left, 0.0), (right, rows)], BLUE.mix(0.55).filled()),
            Rectangle::new([(left, rows), (right, all)], PALE.filled()),
        ])?;
        // The share too, since a small bar shows nothing.
        if all > rows && sizes.len() <= 10 {
            let style = font(14, &ORANGE).pos(Pos::new(HPos::Center, VPos::Bottom));
            let share = text::percent((all - rows) / all);
            chart.draw_series([Text::new(share, (i as f64 + 0.5, all + most * 0.01), style)])?;
        }
    }
    // Names under the bars: all that fit.
    let every = sizes.len().div_ceil(14).max(1);
    let baseline = body.get_pixel_range().1.end - 24;
    let range = chart.plotting_area().get_pixel_range().0;
    let (left, top) = (area.get_pixel_range().0.start, area.get_pixel_range().1.start);
    for (i, (name, ..)) in sizes.iter().enumerate().filter(|(i, _)| i % every == 0) {
        let x = range.start + ((range.end - range.start) as f64 * (i as f64 + 0.5) / sizes.len() as f64) as i32;
        let style = font(14, &MUTED).pos(Pos::new(HPos::Center, VPos::Top));
        area.draw(&Text::new(name.clone(), (x - left, baseline - top), style))?;
    }
    Ok(())
}

fn draw_cost(area: &Area<'_>, measured: &Measured) -> Drawn {
    let body = titled(area, "Cost", "step time against cached tokens read")?;
    key(area, &[("decode", BLUE), ("with prompts", ORANGE)])?;
    let mut times: Vec<f64> = measured.steps.iter().map(|step| step.seconds).collect();
    times.sort_by(f64::total_cmp);
    let end = axis(percentile(&times, 0.995));
    let (scale, unit) = if end < 1e-3 { (1e6, "us") } else { (1e3, "ms") };
    let most = measured.steps.iter().map(|step| step.context_tokens).max().unwrap_or(0) as f64;
    let mut chart = ChartBuilder::on(&body)
        .set_label_area_size(LabelAreaPosition::Left, 64)
        .set_label_area_size(LabelAreaPosition::Bottom, 28)
        .build_cartesian_2d(0.0..axis(most), 0.0..end * scale)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_labels(6)
        .y_labels(5)
        .x_label_formatter(&|x| tick(*x))
        .y_label_formatter(&|y| format!("{} {unit}", tick(*y)))
        .label_style(font(14, &MUTED))
        .draw()?;
    let every = measured.steps.len().div_ceil(1500).max(1);
    let shown = |mixed: bool| {
        let steps = measured.steps.iter().step_by(every);
        steps.filter(move |step| step.seconds <= end && (step.prompt_tokens > 0) == mixed)
    };
    for (mixed, color) in [(false, BLUE), (true, ORANGE)] {
        chart.draw_series(shown(mixed).map(|step| {
            Circle::new((step.context_tokens as f64, step.seconds * scale), 2, color.mix(0.45).filled())
        }))?;
    }
    Ok(())
}

type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

fn mesh(chart: &mut Chart<'_, '_>, x_labels: usize, y_labels: usize) -> Drawn {
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_labels(x_labels)
        .y_labels(y_labels)
        .x_label_formatter(&|x| format!("{} s", tick(*x)))
        .y_label_formatter(&|y| tick(*y))
        .label_style(font(14, &MUTED))
        .draw()?;
    Ok(())
}
