//! The roofline plot of a benchmark: what each point reaches, under the device's ceilings.

use std::error::Error as StdError;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::ceilings::Ceilings;
use super::measure::Measurement;
use crate::draw::{BLUE, GRID, MUTED, ORANGE, TEAL, font, key, tick, titled};

const SIZE: (u32, u32) = (1000, 620);

/// Most points that are labelled; more would print over one another.
const LABELLED: usize = 12;

/// Draws the plot as SVG: TFLOP/s against operations per byte of cache, both logarithmic.
///
/// # Errors
/// What the drawing library says; it cannot fail on finite numbers.
pub(crate) fn draw(
    title: &str,
    ceilings: &Ceilings,
    measurements: &[Measurement],
) -> Result<String, Box<dyn StdError>> {
    let intensity = |m: &Measurement| m.flops / m.kv_bytes as f64;
    let span = |values: Vec<f64>| {
        let (least, most) = values.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), &x| (a.min(x), b.max(x)));
        if most > 0.0 { (least / 2.0)..(most * 2.5) } else { 0.1..10.0 }
    };
    let x_span = span(measurements.iter().map(intensity).collect());
    // TFLOP/s at an intensity under both ceilings.
    let slope = ceilings.read.map(|read| move |x: f64| x * read / 1e3);
    let roof = |x: f64| {
        let memory = slope.map_or(f64::INFINITY, |slope| slope(x));
        memory.min(ceilings.matmul.unwrap_or(f64::INFINITY))
    };
    let mut heights: Vec<f64> = measurements.iter().map(Measurement::tflops).collect();
    heights.extend([x_span.start, x_span.end].map(roof).into_iter().filter(|y| y.is_finite()));
    let y_span = span(heights);

    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE)?;
        let body = titled(&root, title, "TFLOP/s against operations per byte of cache")?;
        let mut entries = vec![("measured", BLUE)];
        entries.extend(ceilings.read.map(|_| ("reading memory", TEAL)));
        entries.extend(ceilings.matmul.map(|_| ("multiplying matrices", ORANGE)));
        key(&root, &entries)?;
        let mut chart = ChartBuilder::on(&body)
            .set_label_area_size(LabelAreaPosition::Left, 60)
            .set_label_area_size(LabelAreaPosition::Bottom, 30)
            .build_cartesian_2d(x_span.clone().log_scale(), y_span.clone().log_scale())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(GRID)
            .x_label_formatter(&|x| tick(*x))
            .y_label_formatter(&|y| tick(*y))
            .label_style(font(14, &MUTED))
            .draw()?;
        if let Some(slope) = slope {
            // Straight in logarithms, up to the other ceiling.
            let ridge = ceilings.matmul.map_or(x_span.end, |matmul| matmul / slope(1.0));
            let end = ridge.clamp(x_span.start, x_span.end);
            let ends = [x_span.start, end].map(|x| (x, slope(x)));
            chart.draw_series(LineSeries::new(ends, TEAL.stroke_width(2)))?;
        }
        if let Some(matmul) = ceilings.matmul {
            let ends = [(x_span.start, matmul), (x_span.end, matmul)];
            chart.draw_series(LineSeries::new(ends, ORANGE.stroke_width(2)))?;
        }
        let points = || measurements.iter().map(|m| (m, (intensity(m), m.tflops())));
        chart.draw_series(points().map(|(_, at)| Circle::new(at, 5, BLUE.mix(0.75).filled())))?;
        if measurements.len() <= LABELLED {
            let anchor = Pos::new(HPos::Left, VPos::Center);
            let line = (y_span.end / y_span.start).powf(15.0 / f64::from(SIZE.1));
            let mut labels: Vec<_> = points().collect();
            labels.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
            let mut placed: Vec<(f64, f64)> = Vec::new();
            for (m, (x, mut y)) in labels {
                // Labels of points close together stand under one another.
                for other in placed.iter().filter(|other| (other.0 / x).ln().abs() < 0.3) {
                    y = y.min(other.1 / line);
                }
                placed.push((x, y));
                chart.draw_series([Text::new(m.point.clone(), (x * 1.03, y), font(14, &MUTED).pos(anchor))])?;
            }
        }
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(us: f64) -> Measurement {
        Measurement {
            point: "B1 S1024 H16 q1".into(),
            us,
            us_min: us,
            us_burst: None,
            us_max: us,
            issue_us: 1.0,
            kv_bytes: 1 << 20,
            flops: 3e7,
            error: 0.0,
            error_norm: 0.0,
            error_norm_max: 0.0,
            checked_rows: 1,
            launches: 1,
            replays: 3,
            first_ms: 1.0,
            num_kv_splits: 2,
            kernel: "k".into(),
        }
    }

    #[test]
    fn plots_with_and_without_ceilings() {
        for ceilings in [
            Ceilings::default(),
            Ceilings { read: Some(20.0), ..Ceilings::default() },
            Ceilings { read: Some(4000.0), matmul: Some(700.0), ..Ceilings::default() },
        ] {
            for measurements in [vec![], vec![measurement(10.0)], vec![measurement(10.0), measurement(1000.0)]] {
                let svg = draw("host", &ceilings, &measurements).unwrap();
                assert!(svg.starts_with("<svg") && !svg.contains("NaN") && !svg.contains("inf"), "{ceilings:?}");
            }
        }
    }
}
