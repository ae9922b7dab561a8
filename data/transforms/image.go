package transforms

import (
	"fmt"
	"image"
	"image/color"
	"image/draw"
)

// Image is a picture of bytes: rows of pixels with their channels side by side (HWC), or one plane a channel (CHW).
type Image struct {
	Pix      []byte
	Height   int
	Width    int
	Channels int  // 1 is grey, 3 is RGB
	Planar   bool // CHW
}

// Check tells whether the sizes fit the bytes.
func (m Image) Check() error {
	if m.Height <= 0 || m.Width <= 0 || m.Channels <= 0 || m.Channels > maxChannels {
		return fmt.Errorf("transforms: an image of %dx%d with %d channels", m.Height, m.Width, m.Channels)
	}
	if len(m.Pix) != m.Height*m.Width*m.Channels {
		return fmt.Errorf("transforms: an image of %dx%d with %d channels has %d bytes, these are %d",
			m.Height, m.Width, m.Channels, m.Height*m.Width*m.Channels, len(m.Pix))
	}
	return nil
}

// At is one byte.
func (m Image) At(y, x, c int) byte {
	if m.Planar {
		return m.Pix[(c*m.Height+y)*m.Width+x]
	}
	return m.Pix[(y*m.Width+x)*m.Channels+c]
}

// HWC gives the image with its channels side by side: itself, or a copy.
func (m Image) HWC() Image {
	if !m.Planar || m.Channels == 1 {
		m.Planar = false
		return m
	}
	out := make([]byte, len(m.Pix))
	plane := m.Height * m.Width
	for c := range m.Channels {
		for i, v := range m.Pix[c*plane : (c+1)*plane] {
			out[i*m.Channels+c] = v
		}
	}
	return Image{out, m.Height, m.Width, m.Channels, false}
}

// FromImage converts a decoded image to RGB bytes, or to grey ones where it is grey. Transparency is dropped, not
// blended, as PIL's convert("RGB") does.
func FromImage(src image.Image) Image {
	b := src.Bounds()
	w, h := b.Dx(), b.Dy()
	switch s := src.(type) {
	case *image.Gray:
		out := make([]byte, h*w)
		for y := range h {
			copy(out[y*w:(y+1)*w], s.Pix[y*s.Stride:])
		}
		return Image{out, h, w, 1, false}
	case *image.NRGBA:
		return fromRGBA(s.Pix, s.Stride, h, w)
	case *image.RGBA:
		if s.Opaque() {
			return fromRGBA(s.Pix, s.Stride, h, w)
		}
	case *image.YCbCr:
		out := make([]byte, 0, h*w*3)
		for y := b.Min.Y; y < b.Max.Y; y++ {
			for x := b.Min.X; x < b.Max.X; x++ {
				yi, ci := s.YOffset(x, y), s.COffset(x, y)
				r, g, bl := color.YCbCrToRGB(s.Y[yi], s.Cb[ci], s.Cr[ci])
				out = append(out, r, g, bl)
			}
		}
		return Image{out, h, w, 3, false}
	}
	n := image.NewNRGBA(image.Rect(0, 0, w, h))
	draw.Draw(n, n.Rect, src, b.Min, draw.Src)
	return fromRGBA(n.Pix, n.Stride, h, w)
}

func fromRGBA(pix []byte, stride, h, w int) Image {
	out := make([]byte, h*w*3)
	for y := range h {
		row, dst := pix[y*stride:y*stride+4*w], out[y*w*3:(y+1)*w*3]
		for x := range w {
			copy(dst[3*x:3*x+3], row[4*x:4*x+3])
		}
	}
	return Image{out, h, w, 3, false}
}

// RGB gives three channels: grey is repeated.
func (m Image) RGB() Image {
	if m.Channels == 3 {
		return m
	}
	out := make([]byte, 0, 3*m.Height*m.Width)
	for y := range m.Height {
		for x := range m.Width {
			v := m.At(y, x, 0)
			out = append(out, v, v, v)
		}
	}
	return Image{out, m.Height, m.Width, 3, false}
}
